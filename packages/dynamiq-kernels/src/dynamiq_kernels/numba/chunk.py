"""What kernels know of a chunk: the plan's tables and the key of the random numbers, as addresses and numbers.

Shapes: M super-groups in the tensor, K in the longest chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dynamiq_core.levels import level_table
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.rounding import stratum


class Key(NamedTuple):
    """What the random numbers of an all-reduce depend on: uint64 holding 32 bits each."""

    seed_low: Any
    seed_high: Any
    step: Any
    bucket: Any


class Chunk(NamedTuple):
    """The plan of one chunk; tables are addresses."""

    index: Any  # int32 [K], which super-group
    width: Any  # int32 [K]
    offset: Any  # int32 [K], byte of the first plane
    mean: Any  # float32 [M]
    levels: Any  # float32 [9, 8]
    scales_at: Any  # int64, byte of the scale section
    nonzero: Any  # int64, super-groups of width above 0; they come first
    numel: Any  # int64
    linear: Any  # bool, whether scales are linear
    dithered: Any  # bool, whether decoders subtract the dither
    key: Any


class Slot(NamedTuple):
    """Under which slot a kernel encodes, and its stratum if rounding is correlated; otherwise ``part`` is 0."""

    number: Any  # int64
    workers: Any  # uint32
    start: Any  # uint32, start of the stratum in units of 2**-16
    part: Any  # uint32, its width


def chunk_arguments(plan: DynamiQPlan, chunk: int) -> Chunk:
    """What a kernel gets for a chunk: good as long as the plan lives."""
    config, (seed, step, bucket) = plan.config, plan.key
    return Chunk(
        index=_row(plan.index, chunk),
        width=_row(plan.width, chunk),
        offset=_row(plan.offset, chunk),
        mean=plan.mean.data_ptr(),
        levels=_levels(config.bend).data_ptr(),
        scales_at=int(plan.scales_at.numpy()[chunk]),
        nonzero=int(plan.nonzero.numpy()[chunk]),
        numel=plan.numel,
        linear=config.scales == "linear",
        dithered=config.rounding == "dithered",
        key=Key(*(np.uint64(word & 0xFFFFFFFF) for word in (seed, seed >> 32, step, bucket))),
    )


def _row(table: Tensor, chunk: int) -> int:
    """The address of a row of an int32 table [C, K]."""
    return table.data_ptr() + 4 * table.stride(0) * chunk


@cache
def _levels(bend: float) -> Tensor:
    """The table of levels, kept for good, since kernels know but its address."""
    return level_table(bend)


def slot_arguments(plan: DynamiQPlan, slot: int) -> Slot:
    """What a kernel gets for the slot of an encoding."""
    start, part = stratum(slot, plan.workers) if plan.config.rounding == "correlated" else (0, 0)
    return Slot(slot, np.uint32(plan.workers), np.uint32(start), np.uint32(part))
