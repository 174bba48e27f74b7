"""Philox 4x32-10 for the lanes of a super-group, equal to `dynamiq_core.philox`.

Words are held in 64-bit lanes: a 32 x 32 bit product is then one vector instruction, and its halves a shift apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core import philox, rounding
from dynamiq_kernels.numba.compiling import device

LANES = np.uint64(rounding.LANES)
ROUNDS = philox.ROUNDS
MULTIPLIER_0, MULTIPLIER_1 = (np.uint64(multiplier) for multiplier in philox.MULTIPLIERS)
WEYL_0, WEYL_1 = (np.uint64(weyl) for weyl in philox.WEYL)
MASK = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


@device
def philox_words(words: Any, super_group: Any, lanes: Any, domain: Any, key: Any) -> None:
    """The random words of the first lanes of a super-group.

    Args:
        words: uint64 [64], written: four words of 32 bits of every lane in turn, the low half being the earlier word.
        super_group: its index.
        lanes: how many lanes, an even number; the words of the others stay.
        domain: uint64, stream and slot.
        key: the `Key` of the all-reduce.
    """
    first = np.uint64(super_group) * LANES
    half = lanes // 2
    # Rounds of two lanes side by side: one alone would leave the multiplier idle while its results are on their way.
    for t in range(half):
        a0, a1, a2, a3 = first + np.uint64(t) & MASK, key.bucket, domain, key.seed_high
        b0, b1, b2, b3 = first + np.uint64(t + half) & MASK, key.bucket, domain, key.seed_high
        k0, k1 = key.seed_low, key.step
        for _ in range(ROUNDS):
            p, r, q, s = MULTIPLIER_0 * a0, MULTIPLIER_0 * b0, MULTIPLIER_1 * a2, MULTIPLIER_1 * b2
            a0, b0, a1, b1 = q >> WORD ^ a1 ^ k0, s >> WORD ^ b1 ^ k0, q & MASK, s & MASK
            a2, b2, a3, b3 = p >> WORD ^ a3 ^ k1, r >> WORD ^ b3 ^ k1, p & MASK, r & MASK
            k0, k1 = k0 + WEYL_0 & MASK, k1 + WEYL_1 & MASK
        words[2 * t] = a0 | a1 << WORD
        words[2 * t + 1] = a2 | a3 << WORD
        words[2 * (t + half)] = b0 | b1 << WORD
        words[2 * (t + half) + 1] = b2 | b3 << WORD
