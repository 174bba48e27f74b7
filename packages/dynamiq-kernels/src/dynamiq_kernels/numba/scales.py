"""Scales of the 16 groups, equal to `dynamiq_core.scales`."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core import scales
from dynamiq_core.config import GROUPS
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import bits_of, float_of, stack, window
from dynamiq_kernels.numba.rounding import one_plus, scale_draws

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
RATIOS = np.array((*scales.RATIOS, 0.0), dtype=np.float32)
"""By code; the last one says that the group is zero."""
COARSEST = len(scales.RATIOS)
ZERO_CODE = np.int32(scales.ZERO_CODE)
STEPS = np.float32(scales.STEPS)
STEP = np.float32(1.0 / scales.STEPS)
SMALLEST = np.float32(scales.SMALLEST)
INFINITY = np.int32(0x7F800000)
"""Bits of infinity; of the magnitudes only those of NaN are above."""
LARGEST = np.int32(0x7F7F0000)
"""Bits of the largest bfloat16."""
MAGNITUDE = np.int32(0x7FFFFFFF)
LOG_BYTES, LINEAR_BYTES = scales.group_bytes("log"), scales.group_bytes("linear")


@device
def scale_addresses(k: Any, chunk: Any) -> Any:
    """Bytes of the message at which the k-th super-group's group codes and super scale start."""
    per_group = LINEAR_BYTES if chunk.linear else LOG_BYTES
    return chunk.scales_at + k * per_group, chunk.scales_at + chunk.nonzero * per_group + k * scales.SUPER_BYTES


@device
def read_scales(scale: Any, message: Any, k: Any, chunk: Any) -> None:
    """The group scales of the k-th super-group of a chunk: float32 [16]."""
    group_at, super_at = scale_addresses(k, chunk)
    low, high = np.int32(message[super_at]), np.int32(message[super_at + 1])
    top = float_of(np.int32(low << 16 | high << 24))
    if chunk.linear:
        bytes_ = window(message, group_at, 16)
        for g in range(GROUPS):
            scale[g] = np.float32(bytes_[g]) * (top * STEP)
    else:
        pairs = window(message, group_at, 8)
        for g in range(GROUPS // 2):
            scale[g] = top * RATIOS[pairs[g] & 15]
            scale[g + 8] = top * RATIOS[pairs[g] >> 4]


@device
def write_scales(message: Any, codes: Any, super_scale: Any, k: Any, chunk: Any) -> None:
    """The scales of the k-th super-group of a chunk into the message."""
    group_at, super_at = scale_addresses(k, chunk)
    if chunk.linear:
        bytes_ = window(message, group_at, 16)
        for g in range(GROUPS):
            bytes_[g] = np.uint8(codes[g])
    else:
        pairs = window(message, group_at, 8)
        for g in range(GROUPS // 2):
            pairs[g] = np.uint8(codes[g] | codes[g + 8] << 4)
    message[super_at] = np.uint8(super_scale >> 16)
    message[super_at + 1] = np.uint8(super_scale >> 24)


@device
def group_maxima(maxima: Any, values: Any) -> None:
    """Bits of the largest magnitude of each group: int32 [16]."""
    pairs = stack(128, np.int32)
    fours = stack(64, np.int32)
    for i in range(128):
        pairs[i] = max(bits_of(values[2 * i]) & MAGNITUDE, bits_of(values[2 * i + 1]) & MAGNITUDE)
    for i in range(64):
        fours[i] = max(pairs[2 * i], pairs[2 * i + 1])
    for g in range(GROUPS):
        maxima[g] = max(max(fours[4 * g], fours[4 * g + 1]), max(fours[4 * g + 2], fours[4 * g + 3]))


@device
def encode_scales(inverse: Any, codes: Any, maxima: Any, super_group: Any, slot: Any, chunk: Any) -> Any:
    """Scales from the largest magnitudes.

    Args:
        inverse: float32 [16], written: entries times this lie in [-1, 1]; 0 for a zero or non-finite group.
        codes: int32 [16], written.
        maxima: int32 [16], bits of the magnitudes.
        super_group: which super-group, for the draws of linear scales.
        slot: of the encoding.
        chunk: the plan.

    Returns:
        Bits of the super scale: int32.
    """
    largest = np.int32(0)
    for g in range(GROUPS):
        largest = max(largest, maxima[g])
    finite = largest < INFINITY
    rounded = np.int32(min((largest + 0xFFFF) & -0x10000, LARGEST)) if finite else INFINITY
    rounded = rounded if float_of(largest) >= SMALLEST or not finite else np.int32(0)
    top = float_of(np.int32(rounded))
    if chunk.linear:
        words = stack(64, np.uint64)
        scale_draws(words, super_group, slot, chunk)
        draw = words.view(np.uint16)
        steps = STEPS / top
        for g in range(GROUPS):
            maximum = float_of(maxima[g])
            present = maximum >= SMALLEST and finite
            code = np.int32(min(maximum * steps + (one_plus(draw[g]) - ONE), STEPS)) if present else np.int32(0)
            codes[g] = code if finite else np.int32(STEPS)
            inverse[g] = ONE / maximum if present else ZERO
    else:
        for g in range(GROUPS):
            maximum = float_of(maxima[g])
            present = maximum >= SMALLEST and finite
            code, divisor = np.int32(0), top
            for c in range(1, COARSEST):
                candidate = top * RATIOS[c]
                enough = candidate >= maximum
                code = np.int32(c) if enough else code
                divisor = candidate if enough else divisor
            code = code if present else ZERO_CODE
            codes[g] = code if finite else np.int32(0)
            # The maximum is larger only where the super scale would have left the range of bfloat16.
            inverse[g] = ONE / max(divisor, maximum) if present else ZERO
    return np.int32(rounded)
