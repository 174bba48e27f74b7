"""From merged statistics to a plan: means, order, bit widths and byte offsets, the same on every rank.

Shapes: d coordinates, M super-groups, C chunks, K = ceil(M / C) super-groups in the longest chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core import wire
from dynamiq_core.allocation import Step, allocate, chained_errors, cost, floors, hull
from dynamiq_core.config import MAX_WIDTH, CodecConfig
from dynamiq_core.constants import constant
from dynamiq_core.packing import PLANE
from dynamiq_core.rounding import Key
from dynamiq_core.statistics import counts

MEAN_SHARE = 1 / 32
"""A mean is subtracted where it carries at least this share of a super-group's energy. Elsewhere it would gain
next to nothing and turn exact zeros, such as the untouched rows of an embedding, into noise."""

RESIDUAL_SHARE = 1 / 256
"""Energy below this share of the whole cannot be told from the rounding of bfloat16 statistics."""

TO_DISTRIBUTE = PLANE // 4
"""Bytes of each super-group, a quarter of a bit per coordinate, that a floor of the widths has to leave."""

INDEX_BITS = 27
"""Bits of the largest index of a super-group; see `dynamiq_core.wire.LARGEST_NUMEL`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DynamiQPlan:
    """Everything that encoders and decoders of one all-reduce need to know besides the gradient."""

    config: CodecConfig
    key: Key
    workers: int
    numel: int
    sizes: tuple[int, ...]
    """How many bytes each chunk's message has."""
    lengths: tuple[int, ...]
    """Super-groups of each chunk."""
    mean: Tensor
    """float32 [M], what every worker subtracts; 0 where it is not worth it, NaN where a gradient is not finite."""
    rows: Tensor
    """int32 [C, K, 4], index, width, offset and the bits of the mean of every super-group, which a kernel reads in one
    load of 16 bytes."""
    scales_at: Tensor
    """int32 [C], byte at which the scale section starts."""
    nonzero: Tensor
    """int32 [C], how many super-groups have a width above 0."""
    energies: Tensor
    """float64 [C, K], sum over the workers of the squared norms without the means; 0 past the end."""
    errors: Tensor
    """float64 [C, K], expected squared error of the sum over the workers, if their gradients are uncorrelated."""

    @property
    def index(self) -> Tensor:
        """int32 [C, K], super-groups of each chunk by falling width and then by index; -1 past the end."""
        return self.rows[..., 0]

    @property
    def width(self) -> Tensor:
        """int32 [C, K], their bit widths; 0 past the end."""
        return self.rows[..., 1]

    @property
    def offset(self) -> Tensor:
        """int32 [C, K], byte of the message at which their planes start."""
        return self.rows[..., 2]

    @property
    def subtracted(self) -> Tensor:
        """float32 [C, K], their means; 0 past the end."""
        return self.rows[..., 3].view(torch.float32)

    @property
    def expected_error(self) -> Tensor:
        """float64 [], expected squared error of the sum over the workers, if their gradients are uncorrelated."""
        return self.errors.sum()

    def expected_error_of(self, squares: Tensor, *, growth: float) -> Tensor:
        """Expected squared error of the sum over the workers, once their mean is known: float64 [].

        How much the gradients have in common shows in the energy of their sum. With a correlation of r between any two,
        a super-group of energy F has a sum of energy F (1 + (n - 1) r) and an error of e (1 + (growth - 1) r), where e
        is what it would be for r = 0. The mean that came out holds both. Of a super-group that is not sent it holds
        nothing, and F (1 + (n - 1) r) is lost, where r is taken to be that of the others, or 0 if that is negative.

        Args:
            squares: `dynamiq_core.statistics.squared_norms` of what the all-reduce made, float64 [M].
            growth: by how much the error is larger if all gradients are the same: the sum of the squared numbers of
                gradients in all encodings over the sum of the numbers, (2 n + 1) / 3 for the ring.
        """
        n, count = self.workers, counts(self.numel, squares.device)
        merged = n**2 * (squares - count * self.mean.to(torch.float64).square())
        known = (self.width > 0) & (self.energies > 0)
        common = merged[self.index.to(torch.int64)] - self.energies - self.errors
        full = (n - 1) * self.energies + (growth - 1) * self.errors
        r = (common / torch.where(known & (full > 0), full, 1.0)).clamp(-1 / max(n - 1, 1), 1.0)
        r = torch.where(known, r, 0.0)
        weight = torch.where(known, self.energies, 0.0)
        others = ((r * weight).sum() / weight.sum().clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0.0)
        return (self.errors * torch.where(known, 1 + (growth - 1) * r, 1 + (n - 1) * others)).sum()


class PlanTerms(NamedTuple):
    """What the plans of all tensors of one size have in common: it does not depend on what is in them."""

    sizes: tuple[int, ...]
    """Bytes of each chunk's message."""
    lengths: tuple[int, ...]
    """Super-groups of each chunk."""
    lowest: int
    """Width before the first step."""
    base: int
    """Bytes of a super-group of that width."""
    steps: tuple[Step, ...]
    """What widens super-groups from there on, by falling gain per byte."""
    errors: tuple[float, ...]
    """Squared error of a finished sum relative to the energies that went in, for widths 0 to 8."""


@lru_cache(maxsize=256)
def plan_terms(config: CodecConfig, numel: int, chunks: int, gain: float) -> PlanTerms:
    """The terms of plans; arguments as in `dynamiq_core.protocol.Codec.plan`.

    Raises:
        InputError: d is outside what a message can describe.
    """
    sizes, lengths = wire.message_sizes(config, numel, chunks), wire.chunk_lengths(numel, chunks)
    lowest, steps = _ladder(config, sizes, lengths, gain)
    return PlanTerms(sizes, lengths, lowest, cost(lowest, config), steps, chained_errors(config, gain))


def subtracted_mean(mean: Tensor, energy: Tensor, count: Tensor, *, workers: int, config: CodecConfig) -> Tensor:
    """The mean that every worker subtracts: float32 [M].

    Args:
        mean: float32 [M], sum of the workers' means divided by n.
        energy: float64 [M], sum over the workers of the squared norms.
        count: int32 [M], real coordinates of each super-group.
        workers: number of ranks n.
        config: ``subtract_mean`` keeps only the NaN that marks a non-finite super-group.
    """
    explained = workers * count * mean.to(torch.float64).square()
    keep = ~torch.isfinite(mean)
    if config.subtract_mean:
        keep |= explained >= MEAN_SHARE * energy
    return torch.where(keep & (mean != 0), mean, 0.0)


def make_plan(
    statistics: Tensor,
    numel: int,
    *,
    config: CodecConfig,
    key: Key,
    workers: int,
    chunks: int,
    gain: float,
) -> DynamiQPlan:
    """Derive the plan; arguments as in `dynamiq_core.protocol.Codec.plan`.

    Raises:
        InputError: d is outside what a message can describe.
    """
    sizes, lengths, lowest, base, steps, errors = plan_terms(config, numel, chunks, gain)
    device = statistics.device
    count = counts(numel, device)
    energy = statistics[:, 1].to(torch.float64).square() * count
    # By a tensor: PyTorch multiplies by the reciprocal of a number on GPUs, which has other bits.
    mean = statistics[:, 0].to(torch.float32) / constant([workers], torch.float32, device)
    # Of an energy that overflowed nothing is known, and no bits would be given for it: it is as good as non-finite. And
    # all backends have the same NaN.
    mean = torch.where(torch.isfinite(statistics[:, 1]) & ~mean.isnan(), mean, torch.nan)
    mean = subtracted_mean(mean, energy, count, workers=workers, config=config)
    residual = energy - workers * count * mean.to(torch.float64).square()
    residual = torch.where(mean != 0, torch.maximum(residual, RESIDUAL_SHARE * energy), energy)
    residual = residual.nan_to_num(0.0, 0.0, 0.0)

    largest = residual.max()
    relative = (residual / torch.where(largest > 0, largest, 1.0)).to(torch.float32)
    index = _deal(torch.sort(relative, descending=True, stable=True).indices, chunks)
    present = index >= 0
    entries = torch.where(present, relative[index], 0.0)
    sent = entries > 0 if config.widths[0] == 0 else present
    capacities = constant(sizes, torch.int64, device) - base * sent.sum(dim=1)
    width = torch.where(sent, allocate(entries, capacities, steps, lowest), 0)
    index, width = _in_order(index, width)
    present = index >= 0

    planes = width.cumsum(dim=1) * PLANE
    nonzero = (width > 0).sum(dim=1)
    share = constant(errors, torch.float64, device)
    energies = torch.where(present, residual[index], 0.0)
    offset = (planes - width * PLANE).to(torch.int32)
    subtracted = torch.where(present, mean[index], 0.0).view(torch.int32)
    return DynamiQPlan(
        config=config,
        key=key,
        workers=workers,
        numel=numel,
        sizes=sizes,
        lengths=lengths,
        mean=mean,
        rows=torch.stack((index.to(torch.int32), width, offset, subtracted), dim=2),
        scales_at=planes[:, -1].to(torch.int32),
        nonzero=nonzero.to(torch.int32),
        energies=energies,
        errors=energies * share[width],
    )


def _ladder(
    config: CodecConfig, sizes: Sequence[int], lengths: Sequence[int], gain: float
) -> tuple[int, tuple[Step, ...]]:
    """The lowest width and the steps above it: from the highest of the floors up that all messages can afford.

    Args:
        config: widths and kind of quantiser.
        sizes: bytes of each chunk's message.
        lengths: super-groups of each chunk.
        gain: as for `dynamiq_core.allocation.hull`.
    """
    for floor in floors(config, gain):
        least = cost(floor, config) + TO_DISTRIBUTE
        if all(size >= least * length for size, length in zip(sizes, lengths, strict=True)):
            return hull(config, gain, floor=floor)
    return hull(config, gain)


def _deal(order: Tensor, chunks: int) -> Tensor:
    """Deal super-groups round-robin: int64 [C, K], -1 past the end."""
    longest = -(-order.numel() // chunks)
    padded = torch.nn.functional.pad(order, (0, longest * chunks - order.numel()), value=-1)
    return padded.view(longest, chunks).T.contiguous()


def _in_order(index: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Put the super-groups of every chunk in the order of the message: by falling width, then by index.

    The allocation has them by falling energy. In the order of memory, a message is written in a few sweeps over the
    gradient, one for each width, which caches, page tables and memory itself serve faster than jumps.
    """
    last = MAX_WIDTH + 1  # where nothing is present
    key = torch.where(index >= 0, (MAX_WIDTH - width) << INDEX_BITS | index, last << INDEX_BITS).to(torch.int32)
    key = key.sort(dim=1).values
    place = key >> INDEX_BITS
    index = torch.where(place < last, key & ((1 << INDEX_BITS) - 1), -1)
    return index.to(torch.int64), (MAX_WIDTH - place).clamp(min=0)
