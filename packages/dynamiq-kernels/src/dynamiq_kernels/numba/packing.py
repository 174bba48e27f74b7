"""Bit planes from codes and back, equal to `dynamiq_core.packing`.

A word of a plane holds one bit of each of 32 neighbouring codes. Processors with vectors of bytes make it with a
comparison and a move of the mask, and take it apart with a broadcast and a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.packing import PLANE
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import LANES, array_at, gather_bits, spread_bits

WORDS = SUPER_GROUP // LANES


@device
def write_planes(message: Any, codes: Any, width: Any, offset: Any) -> None:
    """The planes of codes (uint8 [256], on the stack) into the message."""
    for p in range(width):
        plane = array_at(message + offset + PLANE * p, np.uint32)
        for i in range(WORDS):
            plane[i] = gather_bits(codes, LANES * i, p)


@device
def read_planes(codes: Any, message: Any, width: Any, offset: Any) -> None:
    """The codes (uint8 [256], on the stack) of planes in the message."""
    for i in range(SUPER_GROUP):
        codes[i] = 0
    for p in range(width):
        plane = array_at(message + offset + PLANE * p, np.uint32)
        for i in range(WORDS):
            spread_bits(codes, LANES * i, p, plane[i])
