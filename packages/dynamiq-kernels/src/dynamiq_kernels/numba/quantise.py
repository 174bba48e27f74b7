"""One super-group from values to a message and back: the inner loops that the operations share.

Float32 operations are those of `dynamiq_core.reference`, one by one and in its order, so that results are bit-equal;
where a product is exact, to fuse it with the addition that follows changes no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core.config import GROUPS, SUPER_GROUP
from dynamiq_core.levels import COLUMNS
from dynamiq_kernels.numba.chunk import row_of
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at, bits_of, multiply_add, recast, stack
from dynamiq_kernels.numba.packing import read_planes, write_planes
from dynamiq_kernels.numba.rounding import encoding_draws, one_plus, slot_draws
from dynamiq_kernels.numba.scales import INFINITY, encode_scales, read_scales, write_scales

LEVEL_BYTES = 4 * len(COLUMNS)
ONE_AND_A_HALF = np.float32(1.5)
ROUNDER = np.float32(1.5 * 2**23)
"""A sum with it has the nearest integer, ties to even, in its low bits."""


@device
def add_message(values: Any, message: Any, k: Any, number: Any, share: Any, chunk: Any, keys: Any) -> None:
    """Add what a message carries for the k-th super-group of its chunk, times ``share``, to ``values`` [256]."""
    row = row_of(chunk, k)
    width, offset = np.int64(row[1]), np.int64(row[2])
    packed = stack(32, np.uint64)
    codes = recast(packed, np.uint8)
    read_planes(codes, message, width, offset)

    level = array_at(chunk.levels + LEVEL_BYTES * width, np.float32)
    centre, inner_gap, bend, knee, dither = level[0], level[4], level[5], level[6], level[7]
    gap = stack(16, np.float32)
    read_scales(gap, message, k, share, inner_gap, chunk)

    if chunk.dithered:
        words = stack(64, np.uint64)
        slot_draws(words, row[0], number, keys)
        draw = recast(words, np.uint16)
        for i in range(SUPER_GROUP):
            m = np.float32(codes[i]) - centre
            distance = min(max(m, multiply_add(m, bend, -knee)), multiply_add(m, bend, knee))
            distance = multiply_add(ONE_AND_A_HALF - one_plus(draw[i]), dither, distance)
            values[i] = multiply_add(distance, gap[i >> 4], values[i])
    else:
        for i in range(SUPER_GROUP):
            m = np.float32(codes[i]) - centre
            distance = min(max(m, multiply_add(m, bend, -knee)), multiply_add(m, bend, knee))
            values[i] = multiply_add(distance, gap[i >> 4], values[i])


@device
def write_message(message: Any, values: Any, k: Any, slot: Any, chunk: Any, keys: Any) -> None:
    """Quantise ``values`` [256] and write planes and scales of the k-th super-group into the message."""
    row = row_of(chunk, k)
    super_group, width, offset = row[0], np.int64(row[1]), np.int64(row[2])
    scale_codes = stack(2, np.uint64)
    inverse = stack(16, np.float32)
    super_scale = encode_scales(inverse, scale_codes, values, super_group, slot, chunk, keys)
    write_scales(message, scale_codes, super_scale, k, chunk)

    level = array_at(chunk.levels + LEVEL_BYTES * width, np.float32)
    centre, inner, outer, shift = level[0], level[1], level[2], level[3]
    packed = stack(32, np.uint64)
    codes = recast(packed, np.uint8)
    if super_scale == INFINITY:
        for i in range(SUPER_GROUP):
            codes[i] = 0
    else:
        words = stack(64, np.uint64)
        encoding_draws(words, super_group, slot, keys)
        draw = recast(words, np.uint16)
        centre -= ONE_AND_A_HALF
        steep, flat = stack(16, np.float32), stack(16, np.float32)
        for g in range(GROUPS):
            steep[g], flat[g] = inverse[g] * inner, inverse[g] * outer
        for i in range(SUPER_GROUP):
            x, slope = values[i], flat[i >> 4]
            position = max(min(x * steep[i >> 4], multiply_add(x, slope, shift)), multiply_add(x, slope, -shift))
            codes[i] = np.uint8(bits_of(position + (one_plus(draw[i]) + centre) + ROUNDER))
    write_planes(message, codes, width, offset)
