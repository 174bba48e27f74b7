"""Tensor homomorphic compression: codes on a grid that all ranks share, so that codes can be added as they are.

Source: Li, Basat, Vargaftik, Lao, Xu, Tang, Mitzenmacher and Yu, "THC: Accelerating Distributed Deep Learning Using
Tensor Homomorphic Compression", NSDI 2024 (arXiv 2302.08545); the uniform variant.

A randomised Hadamard transform makes a gradient's coordinates alike and nearly normal. All ranks take the same range,
a few standard deviations of the rank with the largest norm, cut off what lies beyond, and round stochastically to
levels at equal distances. The sum of the ranks' codes then is the code of the sum.

What a multi-hop all-reduce and this engine make different from the source, which has a parameter server:

* All messages of a chunk have one size, so the first hop's codes travel in the bits of the last hop's sum. The source
  sends narrow codes up and wide sums down. Here ``bits`` is the width of the sum: n ranks share its 2**bits - 1 steps.
* For that reason there is no table of non-uniform levels: it makes codes narrower at the price of a coarser grid.
* The transform works on blocks of 1,024 coordinates with a range for each, and not on the whole gradient: a chunk can
  be decoded by itself, and little is lost to padding. The error is the same, since it is proportional to the squared
  range, and the squared norms of the blocks add up to that of the whole.
* What is cut off is lost. The source adds it to the next gradient (error feedback); its cut at 1/32 of the coordinates
  is kept. With a wider range nothing is lost, and the levels are further apart.

Shapes: d coordinates, M blocks of B = 1,024 coordinates, m of them in the chunk at hand, n workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.baselines.blocks import BlockPlan, block_plan, pack, unpack
from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.errors import ConfigError, InputError
from dynamiq_core.protocol import Codec, Received
from dynamiq_core.rounding import Key, Stream, centred, draws

BLOCK = 1024
"""Coordinates that are transformed together."""

REACH = 2.154
"""Standard deviations to which the range extends: 1/32 of normal coordinates lie beyond."""

_TINY = 2.0**-100  # below it a range cannot be inverted in float32


class THCPlan(NamedTuple):
    """Ranges of blocks, and the grid on which they are quantised.

    Attributes:
        layout: which blocks each chunk has.
        key: of the random numbers.
        reach: float32 [M], half the range; 0 where there is nothing, NaN where a gradient is not finite.
        steps: the grid's steps, one less than its levels.
        width: bits of a sum of n codes.
    """

    layout: BlockPlan
    key: Key
    reach: Tensor
    steps: int
    width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each chunk's message has."""
        return self.layout.sizes


class THC(Codec[THCPlan]):
    """Uniform THC: messages are sums of integers, and no hop adds an error; see `dynamiq_core.baselines.thc`.

    Args:
        bits: of a coordinate in every message, 2 to 16. n ranks have floor((2**bits - 1) / n) + 1 levels each; 8 bits,
            which is what the source sends down, leave 32 of them to 8 ranks.
        reach: standard deviations to which the range extends.
        seed: shared seed, 0 to 2**64 - 1.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, bits: int = 8, *, reach: float = REACH, seed: int = 0) -> None:
        if type(bits) is not int or not 2 <= bits <= 16:
            raise ConfigError(f"bits of THC must be an integer from 2 to 16, not {bits!r}")
        if not isinstance(reach, (int, float)) or not 0.5 <= reach <= math.sqrt(BLOCK):
            raise ConfigError(f"reach of THC must be from 0.5 to {math.sqrt(BLOCK):g}, not {reach!r}")
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}")
        self.bits, self.reach, self.seed = bits, float(reach), seed

    def __repr__(self) -> str:
        return f"THC({self.bits}, reach={self.reach:g}, seed={self.seed})"

    def fingerprint(self) -> str:
        """The parameters."""
        return f"thc bits={self.bits} reach={self.reach!r} seed={self.seed}"

    def statistics(self, x: Tensor) -> Tensor:
        """Root mean square of every block of ``x`` [d]: bfloat16 [M, 1]."""
        layout = block_plan(x.numel(), workers=1, chunks=1, block=BLOCK, block_bytes=0)
        square = layout.blocks(x, 0).to(torch.float64).square().mean(dim=1)
        return square.sqrt().to(torch.float32).to(torch.bfloat16)[:, None]

    def merge_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """The largest of the workers' ``parts``; NaN where one of them has NaN."""
        return torch.stack(list(parts)).amax(dim=0)

    def plan(
        self,
        statistics: Tensor | None,
        numel: int,
        *,
        device: torch.device,
        workers: int,
        chunks: int,
        step: int = 0,
        bucket: int = 0,
        gain: float | None = None,
    ) -> THCPlan:
        """The grid; arguments as in `Codec.plan`.

        Raises:
            InputError: an argument is out of range, or there are so many workers that two levels are too many.
        """
        layout = block_plan(numel, workers=workers, chunks=chunks, block=BLOCK, block_bytes=BLOCK * self.bits // 8)
        if statistics is None or statistics.shape != (layout.bounds[-1], 1):
            shape = None if statistics is None else tuple(statistics.shape)
            raise InputError(f"statistics must be of shape {(layout.bounds[-1], 1)}, not {shape}")
        steps = (2**self.bits - 1) // workers
        if steps < 1:
            raise InputError(f"sums of {self.bits} bits hold up to {2**self.bits - 1} workers, not {workers}")
        # The transform keeps norms: afterwards the root mean square is the standard deviation.
        reach = statistics[:, 0].to(device, torch.float32) * self.reach
        reach = torch.where(reach.abs() < _TINY, 0.0, reach)
        reach = torch.where(reach.isfinite(), reach, torch.nan)
        return THCPlan(layout, Key(self.seed, step, bucket), reach, steps, self.bits)

    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: THCPlan,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop, as in `Codec.decompress_accumulate_recompress`: one's own codes, and integers added to them."""
        total = self._codes(x, plan, chunk=chunk, slot=slot)
        for message, _ in received:
            total += unpack(message, plan.width).view(-1, BLOCK)
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        return out.copy_(pack(total.flatten(), plan.width))

    def decompress(self, message: Tensor, plan: THCPlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """The chunk's coordinates of ``out`` [d] become the mean; see `Codec.decompress`."""
        total = unpack(message, plan.width).view(-1, BLOCK).to(torch.float32)
        reach = _rows(plan.reach, plan, chunk)
        values = (total / (plan.layout.workers * plan.steps) - 0.5) * (2 * reach)
        plan.layout.write(hadamard(values) * _signs(plan, chunk), out, chunk)
        return out

    def _codes(self, x: Tensor, plan: THCPlan, *, chunk: int, slot: int) -> Tensor:
        """This rank's codes: int64 [m, B] from 0 to the number of steps."""
        rotated = hadamard(plan.layout.blocks(x, chunk) * _signs(plan, chunk))
        reach = _rows(plan.reach, plan, chunk)
        per_step = torch.where(reach > 0, plan.steps / (2 * reach), 0.0)
        position = (rotated * per_step + plan.steps / 2).nan_to_num(0.0).clamp(0, plan.steps)
        return torch.floor(position + _thresholds(plan, chunk, slot=slot)).clamp(max=plan.steps).to(torch.int64)


def hadamard(values: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of every row, its own inverse: float32 [m, B], B a power of two.

    Sums of pairs, and no matrix product: every device and library gives the same bits.
    """
    length = values.shape[1]
    half = 1
    while half < length:
        pairs = values.view(-1, length // (2 * half), 2, half)
        first, second = pairs.unbind(dim=2)
        values = torch.stack((first + second, first - second), dim=2).view(-1, length)
        half *= 2
    return values * (1 / math.sqrt(length))


def _rows(per_block: Tensor, plan: THCPlan, chunk: int) -> Tensor:
    return per_block[plan.layout.bounds[chunk] : plan.layout.bounds[chunk + 1], None]


def _signs(plan: THCPlan, chunk: int) -> Tensor:
    """The transform's random signs, the same on all ranks: float32 [m, B], four of them out of every draw."""
    blocks = torch.arange(*plan.layout.bounds[chunk : chunk + 2], device=plan.reach.device)
    every = draws(plan.key, blocks, slot=0, stream=Stream.ROTATION)
    bits = torch.stack([every >> k & 1 for k in range(BLOCK // SUPER_GROUP)], dim=2)
    return (1 - 2 * bits).to(torch.float32).view(-1, BLOCK)


def _thresholds(plan: THCPlan, chunk: int, *, slot: int) -> Tensor:
    """What decides between two levels: float32 [m, B] in (0, 1)."""
    first, last = (bound * (BLOCK // SUPER_GROUP) for bound in plan.layout.bounds[chunk : chunk + 2])
    super_groups = torch.arange(first, last, device=plan.reach.device)
    return centred(draws(plan.key, super_groups, slot=slot)).view(-1, BLOCK)
