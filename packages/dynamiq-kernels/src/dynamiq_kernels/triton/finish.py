"""The end of an all-reduce: decompress, add one n-th to the mean, round to the dtype."""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dynamiq_core import DynamiQPlan
from dynamiq_kernels.triton.gradients import lanes_within, store, tail_of, up_to_the_largest
from dynamiq_kernels.triton.hop import RANDOM
from dynamiq_kernels.triton.launch import check, chunk_of, launch, options_of
from dynamiq_kernels.triton.quantise import add_message, row_of


@triton.jit(
    do_not_specialize=["slot", "count", "numel", *RANDOM],
    do_not_specialize_on_alignment=["scales_at", "nonzero", "message"],
)
def finish_kernel(
    message, slot, out, count, numel, share,
    rows, scales_at, nonzero, table, ratios, bend, less_one, seed_low, seed_high, step, bucket,
    TAIL: tl.constexpr, DITHERED: tl.constexpr, CORRELATED: tl.constexpr, LINEAR: tl.constexpr,
    FEWEST: tl.constexpr, SG: tl.constexpr,
):  # fmt: skip
    """Write the mean over the workers of a chunk's ``count`` super-groups into ``out``."""
    lane = tl.arange(0, 32)[None, :]
    random = (seed_low, seed_high, step, bucket)
    chunk = (table, ratios, bend, less_one, tl.load(scales_at), tl.load(nonzero))
    for first in range(tl.program_id(0) * SG, count, tl.num_programs(0) * SG):
        k = tl.minimum(first + tl.arange(0, SG)[:, None], count - 1)
        j, w, at, mean = row_of(rows, k)
        counter = (j * 32 + lane).to(tl.uint32, bitcast=True)
        # Of width 0, too: no plane can be taken for granted.
        values = tl.broadcast_to(mean[None], [8, SG, 32])
        values, gap = add_message(values, message, k, w, at, counter, slot, share, chunk, random, DITHERED, LINEAR, 0)
        if out.dtype.element_ty != tl.float32:
            values = up_to_the_largest(values, gap, out.dtype.element_ty)
        store(out, values, j, lanes_within(counter, numel, TAIL), numel, TAIL)


def finish(message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None:
    """Write the mean over the workers of a chunk's coordinates into ``out`` [d]; see `dynamiq_core.reference`."""
    check([message, out], [message])
    if not plan.lengths[chunk]:
        return
    launch(
        finish_kernel, plan.lengths[chunk], out.device,
        message=message, slot=slot, out=out, count=plan.lengths[chunk], numel=plan.numel,
        share=1 / plan.workers, **chunk_of(plan, chunk), TAIL=tail_of(plan.numel), **options_of(plan.config),
    )  # fmt: skip
