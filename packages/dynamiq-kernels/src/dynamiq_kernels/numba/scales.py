"""Scales of the 16 groups, equal to `dynamiq_core.scales`."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core import scales
from dynamiq_core.config import GROUP, GROUPS
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at, bits_of, float_of, largest_of_group, recast, stack
from dynamiq_kernels.numba.rounding import one_plus, scale_draws

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
BITS_0, BITS_1, BITS_2, BITS_3 = (np.int32(b) for b in np.array(scales.RATIOS[:4], dtype=np.float32).view(np.int32))
"""Bits of the ratios within an octave; those of lower octaves are the same but for their exponent."""
OCTAVE = 1 << 23
COARSEST = len(scales.RATIOS) - 1
ZERO_CODE = scales.ZERO_CODE
STEPS = np.float32(scales.STEPS)
STEP = np.float32(1.0 / scales.STEPS)
SMALLEST = np.float32(scales.SMALLEST)
INFINITY = np.int32(0x7F800000)
"""Bits of infinity; of the magnitudes only those of NaN are above."""
LARGEST = np.int32(0x7F7F0000)
"""Bits of the largest bfloat16."""
LOG_BYTES, LINEAR_BYTES = scales.group_bytes("log"), scales.group_bytes("linear")


@device
def scale_addresses(k: Any, chunk: Any) -> Any:
    """Bytes of the message at which the k-th super-group's group codes and super scale start."""
    per_group = LINEAR_BYTES if chunk.linear else LOG_BYTES
    return chunk.scales_at + k * per_group, chunk.scales_at + chunk.nonzero * per_group + k * scales.SUPER_BYTES


@device
def ratio_of(code: Any) -> Any:
    """The ratio of a logarithmic code: float32, 0 for a zero group."""
    quarter = code & 3
    bits = BITS_1 if quarter == 1 else BITS_0
    bits = BITS_2 if quarter == 2 else bits
    bits = BITS_3 if quarter == 3 else bits
    bits = np.int32(bits - (code >> 2) * OCTAVE)
    return float_of(np.int32(bits if code < ZERO_CODE else 0))


@device
def read_scales(gap: Any, message: Any, k: Any, divisor: Any, inner_gap: Any, chunk: Any) -> None:
    """The inner gaps of the groups of a chunk's k-th super-group, divided by ``divisor``: float32 [16]."""
    group_at, super_at = scale_addresses(k, chunk)
    top = float_of(np.int32(np.int32(array_at(message + super_at, np.uint16)[0]) << 16))
    if chunk.linear:
        step = top * STEP
        codes = array_at(message + group_at, np.uint8)
        for g in range(GROUPS):
            gap[g] = np.float32(codes[g]) * step / divisor * inner_gap
    else:
        pairs = array_at(message + group_at, np.uint8)
        for g in range(GROUPS // 2):
            gap[g] = top * ratio_of(np.int32(pairs[g]) & 15) / divisor * inner_gap
            gap[g + 8] = top * ratio_of(np.int32(pairs[g]) >> 4) / divisor * inner_gap


@device
def write_scales(message: Any, codes: Any, super_scale: Any, k: Any, chunk: Any) -> None:
    """The scales of the k-th super-group of a chunk into the message."""
    group_at, super_at = scale_addresses(k, chunk)
    if chunk.linear:
        out = array_at(message + group_at, np.uint8)
        for g in range(GROUPS):
            out[g] = np.uint8(codes[g])
    else:
        pairs = array_at(message + group_at, np.uint8)
        for g in range(GROUPS // 2):
            pairs[g] = np.uint8(codes[g] | codes[g + 8] << 4)
    array_at(message + super_at, np.uint16)[0] = np.uint16(super_scale >> 16)


@device
def encode_scales(inverse: Any, codes: Any, values: Any, super_group: Any, slot: Any, chunk: Any) -> Any:
    """Scales from the largest magnitudes.

    Args:
        inverse: float32 [16], written: entries times this lie in [-1, 1]; 0 for a zero or non-finite group.
        codes: int32 [16], written.
        values: float32 [256].
        super_group: which super-group, for the draws of linear scales.
        slot: of the encoding.
        chunk: the plan.

    Returns:
        Bits of the super scale: int32.
    """
    maxima = stack(16, np.int32)
    largest = np.int32(0)
    for g in range(GROUPS):
        maxima[g] = largest_of_group(values, GROUP * g)
        largest = max(largest, maxima[g])
    finite = largest < INFINITY
    rounded = np.int32(min((largest + 0xFFFF) & -0x10000, LARGEST)) if finite else INFINITY
    rounded = rounded if float_of(largest) >= SMALLEST or not finite else np.int32(0)
    top = float_of(np.int32(rounded))
    if chunk.linear:
        words = stack(64, np.uint64)
        scale_draws(words, super_group, slot, chunk)
        draw = recast(words, np.uint16)
        steps = STEPS / top
        for g in range(GROUPS):
            maximum = float_of(maxima[g])
            present = maximum >= SMALLEST and finite
            code = np.int32(min(maximum * steps + (one_plus(draw[g]) - ONE), STEPS)) if present else np.int32(0)
            codes[g] = code if finite else np.int32(STEPS)
            inverse[g] = ONE / maximum if present else ZERO
    else:
        # The ratios within an octave, and the maxima moved up into the octave below the super scale.
        step_1, step_2, step_3 = top * float_of(BITS_1), top * float_of(BITS_2), top * float_of(BITS_3)
        for g in range(GROUPS):
            maximum = float_of(maxima[g])
            present = maximum >= SMALLEST and finite
            octave = np.int32(min(max(np.int32(rounded - maxima[g]) >> 23, 0), COARSEST >> 2))
            moved = float_of(np.int32(maxima[g] + octave * OCTAVE))
            quarter, divisor = (1, step_1) if step_1 >= moved else (0, top)
            quarter, divisor = (2, step_2) if step_2 >= moved else (quarter, divisor)
            quarter, divisor = (3, step_3) if step_3 >= moved and octave < COARSEST >> 2 else (quarter, divisor)
            divisor = float_of(np.int32(bits_of(divisor) - octave * OCTAVE))
            codes[g] = (octave * 4 + quarter if present else ZERO_CODE) if finite else 0
            # The maximum is larger only where the super scale would have left the range of bfloat16.
            inverse[g] = ONE / max(divisor, maximum) if present else ZERO
    return np.int32(rounded)
