"""Philox 4x32-7 for the lanes of a super-group, equal to `dynamiq_core.philox`.

Words are held in 64-bit lanes: a 32 x 32 bit product is then one vector instruction, and its halves a shift apart. That
instruction does not look at upper halves, so that what is left there need not be cleared.
Several vectors go through the rounds side by side, since one alone would wait for its products; and there is one copy
of them in a kernel, since unrolled rounds take a good part of what a processor keeps decoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from dynamiq_core import philox, rounding
from dynamiq_kernels.numba.compiling import device, subroutine
from dynamiq_kernels.numba.memory import intrinsic, pointer_to
from dynamiq_kernels.numba.vectors import I64, Vector

LANES = rounding.LANES
TOGETHER = 16
"""Lanes that go through the rounds side by side."""
MASK = 0xFFFFFFFF
WEYL_0, WEYL_1 = philox.WEYL
BUCKET, SEED_HIGH = 2 * philox.ROUNDS, 2 * philox.ROUNDS + 1
SIZE = 2 * philox.ROUNDS + 2
"""Words of an expanded key: two for every round, the bucket, the high word of the seed."""


@device
def expand_key(keys: Any, key: Any) -> None:
    """The keys of the rounds and the constant words of the counter: uint64 [SIZE]."""
    for i in range(philox.ROUNDS):
        keys[2 * i] = np.uint64((np.int64(key.seed_low) + i * WEYL_0) & MASK)
        keys[2 * i + 1] = np.uint64((np.int64(key.step) + i * WEYL_1) & MASK)
    keys[BUCKET], keys[SEED_HIGH] = key.bucket, key.seed_high


@subroutine
def philox_words(words: Any, super_group: Any, lanes: Any, domain: Any, keys: Any) -> None:
    """The random words of the first lanes of a super-group.

    Args:
        words: uint64 [64], written: four words of 32 bits of every lane in turn, the low half being the earlier word.
        super_group: its index, int64.
        lanes: how many at least.
        domain: uint64, stream and slot.
        keys: as `expand_key` writes them.
    """
    for lane in range(0, lanes, TOGETHER):
        lane_words(words, lane, super_group, domain, keys)


@intrinsic
def lane_words(_typing: Any, words: Any, lane: Any, super_group: Any, domain: Any, keys: Any) -> Any:
    """The random words of the lanes from ``lane`` (int64) on; other arguments as in `philox_words`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, lane, super_group, domain, keys = args

        def key(i: int) -> Any:
            return builder.load(pointer_to(context, builder, signature.args[4], keys, I64(i)))

        first = builder.add(builder.mul(super_group, I64(LANES)), lane)
        c0 = Vector.of(builder, I64, range(TOGETHER)) + first
        c1, c2, c3 = (Vector.equal(builder, word, TOGETHER) for word in (key(BUCKET), domain, key(SEED_HIGH)))
        for i in range(philox.ROUNDS):
            product_0, product_1 = (c0 & MASK) * philox.MULTIPLIERS[0], (c2 & MASK) * philox.MULTIPLIERS[1]
            c0, c1 = product_1 >> 32 ^ (c1 ^ key(2 * i)), product_1
            c2, c3 = product_0 >> 32 ^ (c3 ^ key(2 * i + 1)), product_0
        order = (i for t in range(TOGETHER) for i in (t, TOGETHER + t))
        pairs = (c0 & MASK | c1 << 32).shuffle(c2 & MASK | c3 << 32, order)
        pairs.store(pointer_to(context, builder, signature.args[0], words, builder.mul(lane, I64(2))))
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, types.uint64, keys), codegen
