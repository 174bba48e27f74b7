"""The draws of shared-seed rounding, equal to `dynamiq_core.rounding`: whole floats, 2**16 times the threshold.

Shapes as in `lanes`.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_core.rounding import Stream
from dynamiq_kernels.triton.philox import draws, words

_ROTATION = tl.constexpr(int(Stream.ROTATION) << 24)
_SCALE = tl.constexpr(int(Stream.SCALE) << 24)
_LOWEST = tl.constexpr(0x00010001)
"""The lowest bit of both draws in a word: thresholds are odd multiples of 2**-16."""


@triton.jit
def slot_draws(counter, slot, random):
    """Odd draws of a slot's own stream: float32 [8, SG, 32]."""
    return draws(counter, slot, random, _LOWEST).to(tl.float32)


@triton.jit
def encoding_draws(counter, slot, stratum, random, CORRELATED: tl.constexpr):
    """Odd draws under which a slot encodes: its own, or stratified among the slots: float32 [8, SG, 32]."""
    if CORRELATED:
        start, width, workers = stratum
        draw = draws(counter, slot, random, 0)
        turn = draws(counter, tl.full([], _ROTATION, tl.int32), random, 0)
        rotation = (turn * workers.to(tl.uint32) >> 16) * width.to(tl.uint32)
        stratified = rotation + start.to(tl.uint32) + (draw * width.to(tl.uint32) >> 16)
        return (stratified & 0xFFFF | 1).to(tl.float32)
    else:
        return slot_draws(counter, slot, random)


@triton.jit
def group_thresholds(super_group, slot, random):
    """The threshold of every lane's group: float32 [SG, 32]. Group g takes draw g mod 8 of scale lane g div 8."""
    lane = tl.arange(0, 32)[None, :]
    counter = (super_group * 32 + (lane >> 4)).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = words(counter, slot | _SCALE, random)
    word = (lane >> 2) & 3
    w = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    draw = (w >> (((lane >> 1) & 1) * 16).to(tl.uint32)) & 0xFFFF
    return (draw | 1).to(tl.float32) * (1.0 / 65536)
