"""Scales of a lane's group, equal to `dynamiq_core.scales`. Both lanes of a group hold the same.

Shapes as in `lanes`; k is the place of a super-group in its chunk, int32 [SG, 1].
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_core import levels, scales
from dynamiq_kernels.triton.lanes import bits, floating, fma, of_the_group
from dynamiq_kernels.triton.rounding import group_thresholds

_INFINITY = tl.constexpr(0x7F800000)
_TOO_LARGE = tl.constexpr((int(scales.TOO_LARGE.hex().split("p")[1]) + 127) << 23)
_SMALLEST = tl.constexpr((int(scales.SMALLEST.hex().split("p")[1]) + 127) << 23)
_MARGIN = tl.constexpr(levels.MARGIN)
_STEPS = tl.constexpr(float(scales.STEPS))
_MOST = tl.constexpr(scales.STEPS)
_STEP = tl.constexpr(1.0 / scales.STEPS)
_ZERO = tl.constexpr(scales.ZERO_CODE)
_FINEST = tl.constexpr(len(scales.RATIOS) - 1)
_QUARTER = tl.constexpr(scales.RATIOS[1])
_HALF = tl.constexpr(scales.RATIOS[2])
_THREE_QUARTERS = tl.constexpr(scales.RATIOS[3])


@triton.jit
def super_scale_pointer(section, k, nonzero, LINEAR: tl.constexpr):
    """Where the super scale lies: pointers to uint16 [SG, 1]."""
    return (section + nonzero * (16 if LINEAR else 8) + k * 2).to(tl.pointer_type(tl.uint16))


@triton.jit
def read_scale(section, k, nonzero, ratios, LINEAR: tl.constexpr, FEWEST: tl.constexpr):
    """The scale of every lane's group: float32 [SG, 32]; 0 where there is none, as may be if FEWEST is 0."""
    lane, present = tl.arange(0, 32)[None, :], (FEWEST > 0) | (k < nonzero)
    top = tl.load(super_scale_pointer(section, k, nonzero, LINEAR), mask=present, other=0)
    top = floating(top.to(tl.uint32) << 16)
    if LINEAR:
        code = tl.load(section + k * 16 + (lane >> 1), mask=present, other=0)
        return code.to(tl.float32) * (top * _STEP)
    else:
        byte = tl.load(section + k * 8 + ((lane >> 1) & 7), mask=present, other=0).to(tl.int32)
        return top * tl.load(ratios + ((byte >> ((lane >> 4) * 4)) & 15))


@triton.jit
def encode_scales(maximum, super_group, slot, random, ratios, LINEAR: tl.constexpr):
    """Scales from the bits of every lane's largest magnitude.

    Returns:
        bits of the super scale int32 [SG, 1], whether it is finite [SG, 1], group codes int32 [SG, 32], and float32
        [SG, 32] by which entries are multiplied.
    """
    maximum = of_the_group(maximum)
    largest = tl.max(maximum, axis=1)[:, None]
    finite = largest < _TOO_LARGE
    top = tl.where(finite, (largest + 0xFFFF) & -0x10000, _INFINITY)
    top = tl.where(largest < _SMALLEST, 0, top)
    present = finite & (maximum >= _SMALLEST)
    magnitude, scale = floating(maximum), floating(top)
    if LINEAR:
        u = group_thresholds(super_group, slot, random)
        magnitude = tl.where(present, magnitude, 0.0)
        code = magnitude * tl.math.div_rn(_STEPS, tl.where(top > 0, scale, 1.0)) + u
        code = tl.minimum(code, _STEPS).to(tl.int32)
        code = tl.where(present, code, tl.where(finite, 0, _MOST))
        inverse = tl.where(present, tl.math.div_rn(_MARGIN, tl.where(present, magnitude, 1.0)), 0.0)
    else:
        # Whole octaves between scale and maximum, then how many of the three steps inside one fit as well: floats
        # are compared as integers, and a difference of less than zero has its sign bit set.
        octaves = (top - maximum) >> 23
        lifted = maximum + (octaves << 23)
        code = octaves * 4 + 3 - below(scale * _QUARTER, lifted) - below(scale * _HALF, lifted)
        code = code - below(scale * _THREE_QUARTERS, lifted)
        code = tl.where(present, tl.minimum(tl.maximum(code, 0), _FINEST), _ZERO)
        inverse = reciprocal(tl.where(finite & (top > 0), scale, 1.0)) * tl.load(ratios + 16 + code)
        code = tl.where(finite, code, 0)
    return top, finite, code, inverse


@triton.jit
def reciprocal(scale):
    """1 over a bfloat16, rounded to nearest like the quotient of the reference.

    The quotient may be off by some units. One step of Newton's method leaves an error of 2**-44, and the reciprocal of
    a number of eight bits comes no nearer to the middle between two floats than 2**-33, so that it is rounded as it
    should.
    """
    quotient = 1.0 / scale
    return fma(quotient, fma(-scale, quotient, tl.full([], 1.0, tl.float32)), quotient)


@triton.jit
def below(x, limit):
    """1 where positive float32 ``x`` is below the float of bits ``limit``, else 0."""
    return ((bits(x) - limit) >> 31) & 1


@triton.jit
def write_scales(section, k, nonzero, top, code, LINEAR: tl.constexpr):
    """Write group codes and super scale."""
    SG: tl.constexpr = code.shape[0]
    lane = tl.arange(0, 32)[None, :]
    if LINEAR:
        tl.store(section + k * 16 + (lane >> 1), code.to(tl.uint8))
    else:
        # Byte i holds groups i and i + 8, which lie in lanes 16 apart.
        both = tl.sum(tl.reshape(code, [SG, 2, 16]) << (4 * tl.arange(0, 2))[None, :, None], axis=1)
        both = tl.reshape(tl.broadcast_to(both[:, None, :], [SG, 2, 16]), [SG, 32])
        tl.store(section + k * 8 + (lane >> 1), both.to(tl.uint8), mask=lane < 16)
    pointer = super_scale_pointer(section, k, nonzero, LINEAR) + tl.zeros([SG, 32], tl.int32)
    tl.store(pointer, tl.broadcast_to((top >> 16).to(tl.uint16), [SG, 32]), mask=lane == 0)
