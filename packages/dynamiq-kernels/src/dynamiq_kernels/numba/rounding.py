"""Draws of shared-seed rounding, equal to `dynamiq_core.rounding`: 16 bits for every coordinate of a super-group."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.rounding import LANES, Stream
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import float_of, recast, stack
from dynamiq_kernels.numba.philox import philox_words

ROTATION = int(Stream.ROTATION) << 24
SCALE = int(Stream.SCALE) << 24
SCALE_LANES = 2
"""Lanes whose draws serve the 16 groups."""
SIXTEEN = np.uint32(16)
ODD_ONE = 0x3F800080
"""Bits of the float32 1 + 2**-16."""


@device
def one_plus(draw: Any) -> Any:
    """1 + u for the threshold u in (0, 1) of a draw: float32, exact, an odd multiple of 2**-16."""
    return float_of(np.int32(np.int32(draw) << 7 | ODD_ONE))


@device
def slot_draws(words: Any, super_group: Any, number: Any, keys: Any) -> None:
    """The draws of a slot's own stream: uint64 [64], four in each."""
    philox_words(words, np.int64(super_group), LANES, np.uint64(number), keys)


@device
def encoding_draws(words: Any, super_group: Any, slot: Any, keys: Any) -> None:
    """The draws under which a slot encodes: those of its own stream, or stratified among the slots: uint64 [64]."""
    slot_draws(words, super_group, slot.number, keys)
    if slot.part > 0:
        turns = stack(64, np.uint64)
        philox_words(turns, np.int64(super_group), LANES, np.uint64(ROTATION), keys)
        draw, turn = recast(words, np.uint16), recast(turns, np.uint16)
        for i in range(SUPER_GROUP):
            rotation = (np.uint32(turn[i]) * slot.workers >> SIXTEEN) * slot.part
            draw[i] = np.uint16(rotation + slot.start + (np.uint32(draw[i]) * slot.part >> SIXTEEN))


@device
def scale_draws(words: Any, super_group: Any, slot: Any, keys: Any) -> None:
    """The draws of the 16 groups: the first four of uint64 [64]."""
    philox_words(words, np.int64(super_group), SCALE_LANES, np.uint64(SCALE | slot.number), keys)
