"""What kernels know of a chunk: the plan's tables and the key of the random numbers, as addresses and numbers.

Shapes: K super-groups in the longest chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dynamiq_core.levels import level_table
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.rounding import stratum
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at

ROW_BYTES = 16
"""Bytes of the plan's row of a super-group."""


class Key(NamedTuple):
    """What the random numbers of an all-reduce depend on: uint64 holding 32 bits each."""

    seed_low: Any
    seed_high: Any
    step: Any
    bucket: Any


class Chunk(NamedTuple):
    """The plan of one chunk; tables are addresses."""

    rows: Any  # int32 [K, 4]: super-group, width, byte of the first plane, bits of the mean
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
        rows=plan.rows.data_ptr() + ROW_BYTES * plan.rows.shape[1] * chunk,
        levels=_levels(config.bend).data_ptr(),
        scales_at=int(plan.scales_at.numpy()[chunk]),
        nonzero=int(plan.nonzero.numpy()[chunk]),
        numel=plan.numel,
        linear=config.scales == "linear",
        dithered=config.rounding == "dithered",
        key=Key(*(np.uint64(word & 0xFFFFFFFF) for word in (seed, seed >> 32, step, bucket))),
    )


@cache
def _levels(bend: float) -> Tensor:
    """The table of levels, kept for good, since kernels know but its address."""
    return level_table(bend)


@device
def row_of(chunk: Any, k: Any) -> Any:
    """What the plan says of the k-th super-group: int32 [4], its index, width, offset and the bits of its mean."""
    return array_at(chunk.rows + ROW_BYTES * k, np.int32)


def slot_arguments(plan: DynamiQPlan, slot: int) -> Slot:
    """What a kernel gets for the slot of an encoding."""
    start, part = stratum(slot, plan.workers) if plan.config.rounding == "correlated" else (0, 0)
    return Slot(slot, np.uint32(plan.workers), np.uint32(start), np.uint32(part))
