"""Philox 4x32-10 for the lanes of a super-group, equal to `dynamiq_core.philox`.

Words are held in 64-bit lanes: a 32 x 32 bit product is then one vector instruction, and its halves a shift apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiq_core import philox, rounding
from dynamiq_kernels.numba.compiling import subroutine

LANES = np.uint64(rounding.LANES)
ROUNDS = philox.ROUNDS
MULTIPLIER_0, MULTIPLIER_1 = (np.uint64(multiplier) for multiplier in philox.MULTIPLIERS)
WEYL_0, WEYL_1 = (np.uint64(weyl) for weyl in philox.WEYL)
MASK = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


@subroutine
def philox_words(words: Any, super_group: Any, lanes: Any, domain: Any, key: Any) -> None:
    """The random words of the first lanes of a super-group.

    Args:
        words: uint64 [64], written: four words of 32 bits of every lane in turn, the low half being the earlier word.
        super_group: its index.
        lanes: how many lanes; the words of the others stay.
        domain: uint64, stream and slot.
        key: the `Key` of the all-reduce.
    """
    first = np.uint64(super_group) * LANES
    for t in range(lanes):
        c0, c1, c2, c3 = first + np.uint64(t) & MASK, key.bucket, domain, key.seed_high
        k0, k1 = key.seed_low, key.step
        for _ in range(ROUNDS):
            product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
            c0, c1 = product_1 >> WORD ^ c1 ^ k0, product_1 & MASK
            c2, c3 = product_0 >> WORD ^ c3 ^ k1, product_0 & MASK
            k0, k1 = k0 + WEYL_0 & MASK, k1 + WEYL_1 & MASK
        words[2 * t] = c0 | c1 << WORD
        words[2 * t + 1] = c2 | c3 << WORD
