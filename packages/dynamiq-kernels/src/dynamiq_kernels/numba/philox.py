"""Philox 4x32-10 for the lanes of a super-group, equal to `dynamiq_core.philox`.

Words are held in 64-bit lanes: a 32 x 32 bit product is then one vector instruction, and its halves a shift apart.
Several vectors go through the rounds side by side, since one alone would wait for its products; and there is one copy
of them in a kernel, since unrolled rounds take a good part of what a processor keeps decoded.
"""

from __future__ import annotations

from typing import Any

from numba import types

from dynamiq_core import philox, rounding
from dynamiq_kernels.numba.compiling import subroutine
from dynamiq_kernels.numba.memory import intrinsic, pointer_to
from dynamiq_kernels.numba.vectors import I64, Vector

LANES = rounding.LANES
TOGETHER = 16
"""Lanes that go through the rounds side by side."""
MASK = 0xFFFFFFFF


@subroutine
def philox_words(words: Any, super_group: Any, lanes: Any, domain: Any, key: Any) -> None:
    """The random words of the first lanes of a super-group.

    Args:
        words: uint64 [64], written: four words of 32 bits of every lane in turn, the low half being the earlier word.
        super_group: its index, int64.
        lanes: how many at least.
        domain: uint64, stream and slot.
        key: the `Key` of the all-reduce.
    """
    for lane in range(0, lanes, TOGETHER):
        lane_words(words, lane, super_group, domain, key)


@intrinsic
def lane_words(_typing: Any, words: Any, lane: Any, super_group: Any, domain: Any, key: Any) -> Any:
    """The random words of the lanes from ``lane`` (int64) on; other arguments as in `philox_words`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, lane, super_group, domain, key = args
        low, high, step, bucket = (builder.extract_value(key, i) for i in range(4))
        first = builder.add(builder.mul(super_group, I64(LANES)), lane)
        c0 = (Vector.of(builder, I64, range(TOGETHER)) + first) & MASK
        c1, c2, c3 = (Vector.equal(builder, word, TOGETHER) for word in (bucket, domain, high))
        for i in range(philox.ROUNDS):
            k0, k1 = (
                builder.and_(builder.add(word, I64(i * weyl & MASK)), I64(MASK))
                for word, weyl in zip((low, step), philox.WEYL, strict=True)
            )
            product_0, product_1 = c0 * philox.MULTIPLIERS[0], c2 * philox.MULTIPLIERS[1]
            c0, c1 = product_1 >> 32 ^ (c1 ^ k0), product_1 & MASK
            c2, c3 = product_0 >> 32 ^ (c3 ^ k1), product_0 & MASK
        order = (i for t in range(TOGETHER) for i in (t, TOGETHER + t))
        pairs = (c0 | c1 << 32).shuffle(c2 | c3 << 32, order)
        pairs.store(pointer_to(context, builder, signature.args[0], words, builder.mul(lane, I64(2))))
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, types.uint64, key), codegen
