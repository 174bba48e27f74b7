"""Philox 4x32-10 with explicit 32-bit counters, equal to `dynamiq_core.philox`, and the draws made of its words.

The round keys depend on seed and step alone, so the host computes them and the kernel reads them as constants.
Shapes as in `lanes`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_core.philox import MULTIPLIERS, ROUNDS, WEYL
from dynamiq_kernels.triton.lanes import join, unsigned

_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])
_ROUNDS = tl.constexpr(ROUNDS)


def signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits, so that an argument has one type whatever its value."""
    return (word + 2**31) % 2**32 - 2**31


def round_keys(seed: int, step: int) -> tuple[int, ...]:
    """The two words of every round's key, one after the other, as signed integers."""
    first, second = seed & 0xFFFFFFFF, step & 0xFFFFFFFF
    return tuple(signed(key + i * weyl) for i in range(ROUNDS) for key, weyl in zip((first, second), WEYL, strict=True))


@triton.jit
def philox(c0, c1, c2, c3, keys):
    """Four random words uint32 for counters uint32."""
    for i in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _FIRST), tl.mul(c0, _FIRST, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, _SECOND), tl.mul(c2, _SECOND, sanitize_overflow=False)
        c0, c1 = high1 ^ (c1 ^ unsigned(keys[2 * i])), low1
        c2, c3 = high0 ^ (c3 ^ unsigned(keys[2 * i + 1])), low0
    return c0, c1, c2, c3


@triton.jit
def words(counter, stream, random):
    """The four words of every lane: uint32 [SG, 32] each, for lane counters uint32 [SG, 32]."""
    keys, bucket, seed_high = random
    return philox(counter, unsigned(bucket), unsigned(stream), unsigned(seed_high), keys)


@triton.jit
def draws(counter, stream, random, MASK: tl.constexpr):
    """16-bit draws of all coordinates, with the bits of MASK set in every word: uint32 [8, SG, 32]."""
    SG: tl.constexpr = counter.shape[0]
    w0, w1, w2, w3 = words(counter, stream, random)
    pairs = join(w0, w1, w2, w3) | MASK
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)
    return tl.reshape(tl.permute(halves, [0, 3, 1, 2]), [8, SG, 32])
