"""Scales of the 16 groups, equal to `dynamiq_core.scales`.

A step of the logarithmic scales is a quarter of an octave. Within an octave there are four ratios; those of lower
octaves have the same mantissas, so that neither direction needs a table or a search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from dynamiq_core import levels, scales
from dynamiq_core.config import GROUP, GROUPS
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at, float_of, intrinsic, pointer_to, stack
from dynamiq_kernels.numba.rounding import ODD_ONE, scale_draws
from dynamiq_kernels.numba.vectors import F32, I8, I16, I32, I64, Vector, larger, smaller

ZERO, ONE = np.float32(0.0), np.float32(1.0)
RATIO_BITS = tuple(int(bits) for bits in np.array(scales.RATIOS[:4], dtype=np.float32).view(np.int32))
"""Bits of the ratios within an octave."""
INVERSE_BITS = tuple(int(bits) for bits in np.array(scales.INVERSE_RATIOS[:4], dtype=np.float32).view(np.int32))
"""Bits of their reciprocals."""
OCTAVE = 1 << 23
"""What an octave adds to the bits of a float32."""
COARSEST = len(scales.RATIOS) - 1
ZERO_CODE = scales.ZERO_CODE
STEPS = np.float32(scales.STEPS)
STEP = np.float32(1.0 / scales.STEPS)
SMALLEST = int(np.float32(scales.SMALLEST).view(np.int32))
"""Bits of the smallest maximum that is not taken for zero."""
INFINITY = np.int32(0x7F800000)
"""Bits of infinity."""
TOO_LARGE = int(np.float32(scales.TOO_LARGE).view(np.int32))
"""Bits of the smallest maximum that counts as overflow; those of infinity and NaN are above."""
LOG_BYTES, LINEAR_BYTES = scales.group_bytes("log"), scales.group_bytes("linear")
ALL_ONES = np.uint64(2**64 - 1)
NIBBLES, FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
FOLDS = ((4, (0, 1, 2, 3, 8, 9, 10, 11)), (2, (0, 1, 8, 9, 4, 5, 12, 13)), (1, (0, 2, 8, 10, 4, 6, 12, 14)))
"""How two vectors of eight are folded into one: by how much, and which elements are folded onto."""


@device
def scale_addresses(k: Any, chunk: Any) -> Any:
    """Bytes of the message at which the k-th super-group's group codes and super scale start."""
    per_group = LINEAR_BYTES if chunk.linear else LOG_BYTES
    return chunk.scales_at + k * per_group, chunk.scales_at + chunk.nonzero * per_group + k * scales.SUPER_BYTES


@device
def read_super_scale(message: Any, k: Any, chunk: Any) -> Any:
    """The super scale of a chunk's k-th super-group: float32."""
    _, super_at = scale_addresses(k, chunk)
    return float_of(np.int32(np.int32(array_at(message + super_at, np.uint16)[0]) << 16))


@device
def read_scales(gap: Any, message: Any, k: Any, share: Any, inner_gap: Any, chunk: Any) -> None:
    """The inner gaps of the groups of a chunk's k-th super-group, times ``share``: float32 [16]."""
    group_at, _ = scale_addresses(k, chunk)
    top = read_super_scale(message, k, chunk)
    codes = stack(2, np.uint64)
    packed = array_at(message + group_at, np.uint64)
    if chunk.linear:
        codes[0], codes[1] = packed[0], packed[1]
        linear_gaps(gap, codes, top * STEP, share, inner_gap)
    else:
        codes[0], codes[1] = packed[0] & NIBBLES, packed[0] >> FOUR & NIBBLES
        log_gaps(gap, codes, top, share, inner_gap)


@device
def write_scales(message: Any, codes: Any, super_scale: Any, k: Any, chunk: Any) -> None:
    """The scales of the k-th super-group of a chunk into the message; codes are uint64 [2], one in each byte."""
    group_at, super_at = scale_addresses(k, chunk)
    packed = array_at(message + group_at, np.uint64)
    if chunk.linear:
        packed[0], packed[1] = codes[0], codes[1]
    else:
        packed[0] = codes[0] | codes[1] << FOUR
    array_at(message + super_at, np.uint16)[0] = np.uint16(super_scale >> 16)


@intrinsic
def log_gaps(_typing: Any, gap: Any, codes: Any, top: Any, share: Any, inner_gap: Any) -> Any:
    """``top`` times the ratios of 16 codes, times ``share``, times ``inner_gap``: float32 [16] into ``gap``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _read_codes(context, builder, signature, args)
        bits = Vector.equal(builder, I32(RATIO_BITS[0]), GROUPS)
        for quarter in (1, 2, 3):
            bits = ((code & 3) >= quarter).where(RATIO_BITS[quarter], bits)
        bits -= (code >> 2) * OCTAVE
        scale = (code >= ZERO_CODE).where(0, bits).cast(F32, "bitcast") * args[2]
        (scale * args[3] * args[4]).store(pointer_to(context, builder, signature.args[0], args[0], I64(0)))
        return context.get_dummy_value()

    return types.void(gap, codes, types.float32, types.float32, types.float32), codegen


@intrinsic
def linear_gaps(_typing: Any, gap: Any, codes: Any, step: Any, share: Any, inner_gap: Any) -> Any:
    """16 codes times ``step``, times ``share``, times ``inner_gap``: float32 [16] into ``gap``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scale = _read_codes(context, builder, signature, args).cast(F32, "sitofp") * args[2]
        (scale * args[3] * args[4]).store(pointer_to(context, builder, signature.args[0], args[0], I64(0)))
        return context.get_dummy_value()

    return types.void(gap, codes, types.float32, types.float32, types.float32), codegen


def _read_codes(context: Any, builder: Any, signature: Any, args: Any) -> Vector:
    pointer = pointer_to(context, builder, signature.args[1], args[1], I64(0))
    return Vector.load(builder, pointer, I8, GROUPS).cast(I32, "zext")


@intrinsic
def group_maxima(_typing: Any, maxima: Any, values: Any) -> Any:
    """Bits of the largest magnitude of each group of float32 [256]: int32 [16] into ``maxima``, and the largest of all.

    Bits of magnitudes are ordered like them, those of infinity and NaN being the largest.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def half_group(start: int) -> Vector:
            pointer = pointer_to(context, builder, signature.args[1], args[1], I64(start))
            return Vector.load(builder, pointer, I32, GROUP // 2) & 0x7FFFFFFF

        def eight_groups(first: int) -> Vector:
            groups = [larger(half_group(GROUP * g), half_group(GROUP * g + 8)) for g in range(first, first + 8)]
            # From eight vectors to one: the halves, then the quarters, then the eighths of every two are put together.
            left, right = groups[:4], groups[4:]
            for half, order in FOLDS:
                other = [i + half for i in order]
                groups = [larger(a.shuffle(b, order), a.shuffle(b, other)) for a, b in zip(left, right, strict=True)]
                left, right = groups[::2], groups[1::2]
            return groups[0]

        low, high = eight_groups(0), eight_groups(8)
        low.store(pointer_to(context, builder, signature.args[0], args[0], I64(0)))
        high.store(pointer_to(context, builder, signature.args[0], args[0], I64(8)))
        return larger(low, high).reduce("smax")

    return types.int32(maxima, values), codegen


@device
def encode_scales(inverse: Any, codes: Any, values: Any, super_group: Any, slot: Any, chunk: Any, keys: Any) -> Any:
    """Scales of float32 [256].

    Args:
        inverse: float32 [16], written: entries times this lie in [-1, 1]; 0 for a zero or non-finite group.
        codes: uint64 [2], written: a code in each byte.
        values: float32 [256].
        super_group: which super-group, for the draws of linear scales.
        slot: of the encoding.
        chunk: the plan.
        keys: of the draws.

    Returns:
        Bits of the super scale: int32.
    """
    maxima = stack(16, np.int32)
    largest = group_maxima(maxima, values)
    if largest >= TOO_LARGE:
        for g in range(GROUPS):
            inverse[g] = ZERO
        codes[0] = codes[1] = ALL_ONES if chunk.linear else np.uint64(0)
        return INFINITY
    super_scale = np.int32((largest + 0xFFFF) & -0x10000) if largest >= SMALLEST else np.int32(0)
    if chunk.linear:
        words = stack(64, np.uint64)
        scale_draws(words, super_group, slot, keys)
        linear_scales(inverse, codes, maxima, STEPS / float_of(super_scale), words)
    else:
        log_scales(inverse, codes, maxima, super_scale, ONE / float_of(super_scale))
    return super_scale


@intrinsic
def log_scales(_typing: Any, inverse: Any, codes: Any, maxima: Any, super_scale: Any, reciprocal: Any) -> Any:
    """Reciprocals (float32 [16]) and codes (uint64 [2]) from bits of maxima and super scale, and 1 over it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inverse, codes, maxima = (pointer_to(context, builder, signature.args[i], args[i], I64(0)) for i in range(3))
        maximum, top = Vector.load(builder, maxima, I32, GROUPS), Vector.equal(builder, args[3], GROUPS)
        octave = smaller(larger(top - maximum, 0) >> 23, COARSEST >> 2)
        moved = maximum + octave * OCTAVE  # into the octave below the super scale
        code, factor = octave << 2, Vector.equal(builder, I32(INVERSE_BITS[0]), GROUPS)
        for quarter in (1, 2, 3):
            candidate = (top.cast(F32, "bitcast") * scales.RATIOS[quarter]).cast(I32, "bitcast")
            enough = candidate >= moved
            if quarter > COARSEST & 3:
                enough &= octave < COARSEST >> 2
            code = enough.where((octave << 2) + quarter, code)
            factor = enough.where(INVERSE_BITS[quarter], factor)
        present = maximum >= SMALLEST
        present.where((factor + octave * OCTAVE).cast(F32, "bitcast") * args[4], 0.0).store(inverse)
        present.where(code, ZERO_CODE).cast(I8, "trunc").store(codes)
        return context.get_dummy_value()

    return types.void(inverse, codes, maxima, types.int32, types.float32), codegen


@intrinsic
def linear_scales(_typing: Any, inverse: Any, codes: Any, maxima: Any, steps: Any, draws: Any) -> Any:
    """Reciprocals (float32 [16]) and codes (uint64 [2]) from bits of maxima, steps per unit, and 16 draws."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inverse, codes, maxima = (pointer_to(context, builder, signature.args[i], args[i], I64(0)) for i in range(3))
        draws = pointer_to(context, builder, signature.args[4], args[4], I64(0))
        bits = Vector.load(builder, maxima, I32, GROUPS)
        present, maximum = bits >= SMALLEST, bits.cast(F32, "bitcast")
        u = (Vector.load(builder, draws, I16, GROUPS).cast(I32, "zext") << 7 | ODD_ONE).cast(F32, "bitcast") - 1.0
        code = present.where(smaller(maximum * args[3] + u, float(scales.STEPS)), 0.0)
        present.where(Vector.of(builder, F32, [levels.MARGIN] * GROUPS) / maximum, 0.0).store(inverse)
        code.cast(I8, "fptoui").store(codes)
        return context.get_dummy_value()

    return types.void(inverse, codes, maxima, types.float32, draws), codegen
