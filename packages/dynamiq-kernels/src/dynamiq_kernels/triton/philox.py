"""Philox 4x32-7 with explicit 32-bit counters, equal to `dynamiq_core.philox`, and the draws made of its words.

Shapes as in `lanes`.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_core.philox import MULTIPLIERS, ROUNDS, WEYL
from dynamiq_kernels.triton.lanes import join, unsigned

_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])
_ROUNDS = tl.constexpr(ROUNDS)
_WEYL_FIRST = tl.constexpr(WEYL[0])
_WEYL_SECOND = tl.constexpr(WEYL[1])


def signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits, so that an argument has one type whatever its value."""
    return (word + 2**31) % 2**32 - 2**31


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four random words uint32 for counters and keys uint32."""
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _FIRST), tl.mul(c0, _FIRST, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, _SECOND), tl.mul(c2, _SECOND, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        k0 = tl.add(k0, _WEYL_FIRST, sanitize_overflow=False)
        k1 = tl.add(k1, _WEYL_SECOND, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words(counter, stream, random):
    """The four words of every lane: uint32 [SG, 32] each, for lane counters uint32 [SG, 32]."""
    seed_low, seed_high, step, bucket = random
    return philox(counter, unsigned(bucket), unsigned(stream), unsigned(seed_high), unsigned(seed_low), unsigned(step))


@triton.jit
def draws(counter, stream, random, MASK: tl.constexpr):
    """16-bit draws of all coordinates, with the bits of MASK set in every word: uint32 [8, SG, 32]."""
    SG: tl.constexpr = counter.shape[0]
    w0, w1, w2, w3 = words(counter, stream, random)
    pairs = join(w0, w1, w2, w3) | MASK
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)
    return tl.reshape(tl.permute(halves, [0, 3, 1, 2]), [8, SG, 32])
