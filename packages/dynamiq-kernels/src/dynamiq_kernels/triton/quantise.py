"""A super-group from values to a message and back: what the operations share.

Float32 operations are those of `dynamiq_core.reference`. Where it computes exactly - distances of levels and their
products with a dither - the order here is another one with fewer instructions; nothing is rounded on the way, and it
makes no difference whether `tl.math.fma` fuses. Where it does, it is `fma` of `lanes`.
Shapes as in `lanes`.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_kernels.triton.lanes import floating, fma, load_four, unsigned
from dynamiq_kernels.triton.planes import read_planes, write_planes
from dynamiq_kernels.triton.rounding import encoding_draws, slot_draws
from dynamiq_kernels.triton.scales import encode_scales, read_scale, write_scales

_ROW = tl.constexpr(12)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""A sum with it has the nearest integer, ties to even, in its low bits."""


@triton.jit
def copysign(magnitude, sign):
    """``magnitude`` (not negative) with the sign of ``sign``."""
    return floating((unsigned(sign) & 0x80000000) | unsigned(magnitude))


@triton.jit
def row_of(rows, k):
    """What the plan says of super-groups: index and width int32, offset uint32, mean float32, each [SG, 32]."""
    index, width, offset, mean = load_four(rows + k * 4 + tl.zeros([k.shape[0], 32], tl.int32))
    return index, width, offset.to(tl.uint32, bitcast=True), floating(mean)


@triton.jit
def add_message(
    values, message, k, width, offset, counter, slot, share, chunk, random,
    DITHERED: tl.constexpr, LINEAR: tl.constexpr, FEWEST: tl.constexpr,
):  # fmt: skip
    """Float32 [8, SG, 32] plus what a message carries for these super-groups times ``share``, and the gaps [SG, 32]."""
    table, ratios, bend, less_one, scales_at, nonzero = chunk
    row = table + width * _ROW
    start, low, high, dither = load_four(row + 4)
    code = read_planes(message + offset, width, FEWEST).to(tl.float32)
    # Half-integers on one straight line, less what they are shorter in the middle; half a dither included.
    distance = tl.math.fma(code, -less_one, start[None])
    distance = tl.minimum(tl.maximum(distance, low[None]), high[None])
    distance = tl.math.fma(code, bend, distance)
    if DITHERED:
        distance = tl.math.fma(slot_draws(counter, slot, random), dither[None], distance)
    scale = read_scale(message + scales_at, k, nonzero, ratios, LINEAR, FEWEST)
    gap = scale * share * tl.load(row + 8)
    return fma(distance, gap[None], values), gap


@triton.jit
def encode(
    out, values, maximum, real, k, super_group, width, offset, counter, slot, stratum, chunk, random,
    CORRELATED: tl.constexpr, LINEAR: tl.constexpr, FEWEST: tl.constexpr,
):  # fmt: skip
    """Quantise float32 [8, SG, 32] with largest magnitudes (bits, int32 [SG, 32]) and write planes and scales."""
    table, ratios, _, _, scales_at, nonzero = chunk
    half, inner, outer, shift = load_four(table + width * _ROW)
    top, finite, code, inverse = encode_scales(maximum, super_group, slot, random, ratios, LINEAR)
    inverse = tl.where(real, inverse, 0.0)
    magnitude = tl.abs(values)
    position = fma(magnitude, (inverse * outer)[None], shift[None])
    position = tl.minimum(magnitude * (inverse * inner)[None], position)
    draw = encoding_draws(counter, slot, stratum, random, CORRELATED)
    rounded = copysign(position, values) + tl.math.fma(draw, 1.0 / 65536, half[None]) + _ROUNDER
    write_planes(out + offset, unsigned(rounded), width, finite, FEWEST)
    write_scales(out + scales_at, k, nonzero, top, code, LINEAR)
