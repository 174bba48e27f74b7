"""What launchers share: tables on the device, a chunk's arguments, and how a kernel is started.

Kernels are persistent: as many programs as the device can hold, each of which takes every so-many-th super-group. A
program is four warps (two wavefronts of 64) and knows no synchronisation between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dynamiq_core import BackendError, CodecConfig, DynamiQPlan, InputError
from dynamiq_core.config import MAX_WIDTH
from dynamiq_core.levels import COLUMNS, level_table
from dynamiq_core.rounding import RESOLUTION, stratum
from dynamiq_core.scales import INVERSE_RATIOS, RATIOS
from dynamiq_kernels.triton.philox import signed

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU: decided by TRITON_INTERPRET when Triton is imported."""

SUPER_GROUPS = 32 if INTERPRETED else 4
"""Super-groups that a program works on at a time."""

WARPS = 4
"""Warps of 32 lanes of a program."""

PROGRAMS_PER_PROCESSOR = 16
"""More than fit at once, so that the last ones to start fill the gaps."""


class Options(NamedTuple):
    """What kernels are compiled for; see `options_of`."""

    DITHERED: bool
    CORRELATED: bool
    LINEAR: bool
    FEWEST: int


def options_of(config: CodecConfig) -> dict[str, Any]:
    """Compile-time arguments of a configuration; FEWEST is the smallest width above 0."""
    return Options(
        DITHERED=config.rounding == "dithered",
        CORRELATED=config.rounding == "correlated",
        LINEAR=config.scales == "linear",
        FEWEST=min(width for width in config.widths if width),
    )._asdict()


def width_table(bend: float, *, dithered: bool) -> Tensor:
    """Constants of every width as kernels use them: float32 [9, 12] on the CPU, three loads of 16 bytes.

    half, inner, outer, shift     to encode: centre - 1/2, then as in `level_table`
    start, low, high, dither      to decode: distance + dither / 2 = code * bend + clamp(start - code * (bend - 1)),
                                  from which draw * dither is subtracted, draws being 2**16 times a threshold;
                                  the dither is 0 unless decoders subtract it
    gap                           as in `level_table`
    """
    row = dict(zip(COLUMNS, level_table(bend).to(torch.float64).unbind(1), strict=True))
    if not dithered:
        row["dither"] = torch.zeros_like(row["dither"])
    middle = row["dither"] / 2 - row["centre"] * row["bend"]
    start = row["dither"] / 2 - row["centre"]
    nothing = torch.zeros(MAX_WIDTH + 1, dtype=torch.float64)
    columns = [row["centre"] - 0.5, row["inner"], row["outer"], row["shift"]]
    columns += [start, middle - row["offset"], middle + row["offset"], -row["dither"] / RESOLUTION]
    columns += [row["gap"], nothing, nothing, nothing]
    return torch.stack(columns, dim=1).to(torch.float32)


@lru_cache(maxsize=64)
def tables(bend: float, dithered: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """`width_table`, and the ratios of group scales with their reciprocals, 16 each, on a device."""
    ratios = torch.tensor((*RATIOS, 0.0, *INVERSE_RATIOS), dtype=torch.float32)
    return width_table(bend, dithered=dithered).to(device), ratios.to(device)


def chunk_of(plan: DynamiQPlan, chunk: int) -> dict[str, Any]:
    """Arguments that describe a chunk and the random numbers of its all-reduce."""
    config, key = plan.config, plan.key
    table, ratios = tables(config.bend, config.rounding == "dithered", plan.mean.device)
    bend = float(level_table(config.bend)[1, COLUMNS.index("bend")])
    return {
        "rows": plan.rows[chunk],
        "scales_at": plan.scales_at[chunk:],
        "nonzero": plan.nonzero[chunk:],
        "table": table,
        "ratios": ratios,
        "bend": bend,
        "less_one": bend - 1.0,
        "seed_low": signed(key.seed),
        "seed_high": signed(key.seed >> 32),
        "step": signed(key.step),
        "bucket": signed(key.bucket),
    }


def stratum_of(plan: DynamiQPlan, slot: int) -> dict[str, int]:
    """Start and width of a slot's stratum and the number of workers, for correlated rounding."""
    start, part = stratum(slot, plan.workers) if plan.config.rounding == "correlated" else (0, 0)
    return {"start": start, "part": part, "workers": plan.workers}


def check(tensors: Iterable[Tensor], messages: Iterable[Tensor] = ()) -> None:
    """See that kernels can run on these tensors.

    Raises:
        BackendError: the tensors are on a CPU, and kernels are not interpreted.
        InputError: a message starts at an odd address.
    """
    for tensor in tensors:
        if tensor.device.type != "cuda" and not INTERPRETED:
            raise BackendError(
                f"backend 'triton' cannot run on {tensor.device.type!r}: it computes on GPUs; on CPUs its interpreter"
                " does, for tests, if TRITON_INTERPRET=1 was set before Triton was imported"
            )
    for message in messages:
        if message.data_ptr() % 2:
            raise InputError("a message must start at an even address")


def launch(
    kernel: Any,
    count: int,
    device: torch.device,
    /,
    *,
    at_a_time: int = SUPER_GROUPS,
    warps: int = WARPS,
    **arguments: Any,
) -> None:
    """Run a kernel over ``count`` super-groups on the current stream of a device.

    Args:
        kernel: what to run.
        count: super-groups.
        device: where.
        at_a_time: super-groups that a program works on at a time.
        warps: of 32 lanes in a program.
        arguments: of the kernel.
    """
    grid = max(min(-(-count // at_a_time), programs(device)), 1)
    with settings(device):
        kernel[(grid,)](
            **arguments,
            SG=at_a_time,
            num_warps=max(warps * 32 // warp_size(device), 1),
            num_stages=1,
            # Bits are equal only if no product is fused with an addition that the reference rounds separately.
            enable_fp_fusion=False,
        )


@lru_cache(maxsize=64)
def warp_size(device: torch.device) -> int:
    """Lanes of a warp or wavefront."""
    return int(torch.cuda.get_device_properties(device).warp_size) if device.type == "cuda" else 32


@lru_cache(maxsize=64)
def programs(device: torch.device) -> int:
    """Programs of a persistent kernel."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * PROGRAMS_PER_PROCESSOR


def settings(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one; quiet NumPy, whose warnings of infinities a GPU does not give."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    if INTERPRETED:
        import numpy as np

        return np.errstate(all="ignore")
    return ExitStack()
