"""Gradients of three dtypes in and out of float32, by integer operations that vectorise and are exact.

NumPy has no bfloat16, and not every processor converts float16; so both travel as uint16. Reading is exact,
subnormals included. Writing rounds to nearest, ties to even, and makes every NaN the same quiet NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP
from dynamiq_kernels.numba.chunk import row_of
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at, bits_of, float_of, prefetch, stack

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

LARGEST_FLOAT16, LARGEST_BFLOAT16 = (np.float32(torch.finfo(dtype).max) for dtype in (torch.float16, torch.bfloat16))
LARGEST_FLOAT32 = np.float32(torch.finfo(torch.float32).max)

LINE = 64
"""Bytes of a cache line."""
AHEAD = 4
"""Super-groups: one takes about as long as memory takes to answer."""

ZERO = np.float32(0.0)
HALF = np.float32(0.5)
HALF_BITS = 0x3F000000
UNIT = np.float32(2.0**-24)
"""Unit of float16's subnormals."""
REBIAS = 112 << 23
"""Difference between the exponents of float32 and float16, in place."""
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000


class Gradient(NamedTuple):
    """A tensor as kernels see it."""

    address: Any  # int64
    kind: Any  # int64, which dtype


def gradient_arguments(x: Tensor) -> Gradient:
    """What a kernel gets for a tensor [d] of a supported dtype: good as long as the tensor lives."""
    return Gradient(x.data_ptr(), KINDS[x.dtype])


@device
def from_bfloat16(half: Any) -> Any:
    """The float32 of a bfloat16's bits."""
    return float_of(np.int32(np.int32(half) << 16))


@device
def from_float16(half: Any) -> Any:
    """The float32 of a float16's bits."""
    magnitude = np.int32(half & 0x7FFF)
    bits = np.int32((magnitude << 13) + REBIAS)
    bits = np.int32(bits + REBIAS) if magnitude >= 0x7C00 else bits
    value = np.float32(magnitude) * UNIT if magnitude < 0x0400 else float_of(bits)
    return np.copysign(value, from_bfloat16(half))


@device
def to_bfloat16(value: Any) -> Any:
    """The bits of the nearest bfloat16."""
    bits = bits_of(value)
    rounded = np.int32(np.int32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return np.uint16(rounded) if (bits & MAGNITUDE) <= INFINITY else np.uint16(0x7FC0)


@device
def to_float16(value: Any) -> Any:
    """The bits of the nearest float16."""
    bits = bits_of(value)
    magnitude = np.int32(bits & MAGNITUDE)
    normal = np.int32(np.int32(magnitude - REBIAS + 0xFFF + (magnitude >> 13 & 1)) >> 13)
    # The unit of 1/2 in float32 is that of float16's subnormals: the addition rounds them.
    subnormal = np.int32(bits_of(abs(value) + HALF) - HALF_BITS)
    half = subnormal if magnitude < 0x38800000 else normal
    half = np.int32(0x7C00) if magnitude >= 0x47800000 else half
    half = np.int32(0x7E00) if magnitude > INFINITY else half
    return np.uint16(half | (bits >> 16 & 0x8000))


@device
def read(values: Any, x: Any, start: Any, count: Any, mean: Any) -> None:
    """``x[start : start + count]`` less the mean as float32 [256]; what is beyond ``count`` means nothing."""
    if x.kind == FLOAT32:
        wide = array_at(x.address + 4 * start, np.float32)
        if count < SUPER_GROUP:
            for i in range(count):
                values[i] = wide[i] - mean
        else:
            for i in range(SUPER_GROUP):
                values[i] = wide[i] - mean
    else:
        narrow, padded = array_at(x.address + 2 * start, np.uint16), stack(256, np.uint16)
        if count < SUPER_GROUP:
            for i in range(count):
                padded[i] = narrow[i]
            narrow = padded
        if x.kind == BFLOAT16:
            for i in range(SUPER_GROUP):
                values[i] = from_bfloat16(narrow[i]) - mean
        else:
            for i in range(SUPER_GROUP):
                values[i] = from_float16(narrow[i]) - mean


@device
def write(out: Any, values: Any, start: Any, count: Any) -> None:
    """The first ``count`` of float32 [256] into ``out[start : start + count]``, rounded to its dtype."""
    if out.kind == FLOAT32:
        wide = array_at(out.address + 4 * start, np.float32)
        for i in range(count):
            wide[i] = values[i]
    else:
        narrow = array_at(out.address + 2 * start, np.uint16)
        rounded = stack(256, np.uint16)
        if out.kind == BFLOAT16:
            for i in range(SUPER_GROUP):
                rounded[i] = to_bfloat16(values[i])
        else:
            for i in range(SUPER_GROUP):
                rounded[i] = to_float16(values[i])
        for i in range(count):
            narrow[i] = rounded[i]


@device
def largest_of(x: Any) -> Any:
    """The largest number of a tensor's dtype: float32."""
    if x.kind == FLOAT16:
        return LARGEST_FLOAT16
    return LARGEST_BFLOAT16 if x.kind == BFLOAT16 else LARGEST_FLOAT32


@device
def fetch_ahead(x: Any, k: Any, last: Any, chunk: Any) -> None:
    """Ask for the coordinates of a super-group soon to come: no processor foresees the gaps between them."""
    start = np.int64(row_of(chunk, min(k + AHEAD, last - 1))[0]) * SUPER_GROUP
    if x.kind == FLOAT32:
        for line in range(4 * SUPER_GROUP // LINE):
            prefetch(x.address + 4 * start + LINE * line)
    else:
        for line in range(2 * SUPER_GROUP // LINE):
            prefetch(x.address + 2 * start + LINE * line)


@device
def clear_padding(values: Any, count: Any) -> None:
    """Zeros from ``count`` on."""
    for i in range(count, SUPER_GROUP):
        values[i] = ZERO
