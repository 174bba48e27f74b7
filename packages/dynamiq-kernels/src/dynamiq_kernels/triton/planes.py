"""Bit planes from codes and back, equal to `dynamiq_core.packing`: an 8 x 8 bit transposition within each lane.

Shapes as in `lanes`.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_kernels.triton.lanes import split

_ROUNDER_BYTES = tl.constexpr(0x8B400000)
"""The bits of 1.5 * 2**23 in each of four bytes, added up modulo 2**32."""


@triton.jit
def transpose(x, y):
    """Transpose an 8 x 8 matrix of bits, four rows in each word (Warren, Hacker's Delight, 7-3)."""
    t = (x ^ (x >> 7)) & 0x00AA00AA
    x = x ^ t ^ (t << 7)
    t = (y ^ (y >> 7)) & 0x00AA00AA
    y = y ^ t ^ (t << 7)
    t = (x ^ (x >> 14)) & 0x0000CCCC
    x = x ^ t ^ (t << 14)
    t = (y ^ (y >> 14)) & 0x0000CCCC
    y = y ^ t ^ (t << 14)
    t = (x ^ (y << 4)) & 0xF0F0F0F0
    return x ^ t, y ^ (t >> 4)


@triton.jit
def spread(x, y):
    """The bytes of two words, each shifted to the lowest place, what is above undefined: uint32 [8, SG, 32]."""
    SG: tl.constexpr = x.shape[0]
    both = tl.permute(tl.join(x, y), [2, 0, 1])[:, None]
    return tl.reshape(both >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, :, None, None], [8, SG, 32])


@triton.jit
def collect(x0, x1, x2, x3):
    """The low bytes of four sums with 1.5 * 2**23 in one word."""
    # Additions, not bitwise operations, become one multiply-add each.
    word = tl.add(x0, x1 << 8, sanitize_overflow=False)
    word = tl.add(word, x2 << 16, sanitize_overflow=False)
    word = tl.add(word, x3 << 24, sanitize_overflow=False)
    return tl.sub(word, _ROUNDER_BYTES, sanitize_overflow=False)


@triton.jit
def read_planes(pointer, width, FEWEST: tl.constexpr):
    """Codes: uint32 [8, SG, 32], from a pointer to the planes [SG, 1] and widths [SG, 1], at least FEWEST."""
    plane, lane = tl.arange(0, 8)[:, None, None], tl.arange(0, 32)[None, None, :]
    present = (plane < FEWEST) | (plane < width[None])
    byte = tl.load(pointer[None] + (plane * 32 + lane), mask=present, other=0).to(tl.uint32)
    b0, b1, b2, b3, b4, b5, b6, b7 = split(byte)
    x, y = transpose(b0 | b1 << 8 | b2 << 16 | b3 << 24, b4 | b5 << 8 | b6 << 16 | b7 << 24)
    return spread(x, y) & 0xFF


@triton.jit
def write_planes(pointer, rounded, width, keep, FEWEST: tl.constexpr):
    """Write the codes in the low bytes of uint32 [8, SG, 32], sums with 1.5 * 2**23, or zeros where not ``keep``."""
    plane, lane = tl.arange(0, 8)[:, None, None], tl.arange(0, 32)[None, None, :]
    c0, c1, c2, c3, c4, c5, c6, c7 = split(rounded)
    x, y = transpose(collect(c0, c1, c2, c3), collect(c4, c5, c6, c7))
    byte = spread(tl.where(keep, x, 0), tl.where(keep, y, 0)).to(tl.uint8)
    tl.store(pointer[None] + (plane * 32 + lane), byte, mask=(plane < FEWEST) | (plane < width[None]))
