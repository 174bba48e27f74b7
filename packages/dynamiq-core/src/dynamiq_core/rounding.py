"""Shared-seed rounding: the threshold ``u`` that decides whether a coordinate rounds up or down.

Every random number is a 16-bit draw, a function of (seed, step, bucket, super-group, coordinate, slot) alone, so
the receiver of a message can compute the very numbers that its sender used. A position p between two levels
becomes ``floor(p + u)`` with u uniform on (0, 1), which is unbiased whatever the kind:

* *independent*: u comes from the slot's own stream.
* *dithered*: the same u, and the receiver takes ``u - 1/2`` gaps off again. What is left has half the variance
  (Roberts 1962, Schuchman 1964). Streams of different slots are independent, so the roundings of one chain of
  hops stay unbiased given everything that happened before.
* *correlated*: slot h takes u = (order(h) + rotation + jitter_h) / n modulo 1, with one rotation out of 0..n-1 for all
  slots of a coordinate: marginally uniform, jointly stratified (Suresh, Sun, Ro, Yu 2022). Errors of roundings made
  side by side cancel. Along a chain the threshold is not independent of what is being rounded, which leaves a bias.

Shapes: m super-groups, S = 256 coordinates each; lane t owns coordinates 8 t to 8 t + 7.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.config import GROUPS, SUPER_GROUP, CodecConfig
from dynamiq_core.philox import philox4x32

LANES = 32
RESOLUTION = 1 << 16


class Stream(IntEnum):
    """Which use a draw has; no two uses share a counter."""

    SLOT = 0
    ROTATION = 1
    SCALE = 2


class Key(NamedTuple):
    """What the random numbers of one all-reduce depend on."""

    seed: int
    step: int
    bucket: int


def draws(key: Key, super_groups: Tensor, *, slot: int, stream: Stream = Stream.SLOT) -> Tensor:
    """16-bit draws for every coordinate.

    Lane t of super-group j evaluates Philox once at counter (32 j + t, bucket, stream and slot, high seed word)
    under the key (low seed word, step); the halves of its four words, low half first, are the draws of its eight
    coordinates in order.

    Args:
        key: seed, step and bucket.
        super_groups: int64 [m], indices of the super-groups.
        slot: which of the n roundings of a chunk this is; 0 to 2**24 - 1.
        stream: what the draws are used for.

    Returns:
        int64 [m, 256] with values in [0, 2**16).
    """
    lane = torch.arange(LANES, device=super_groups.device)
    counter = super_groups[:, None] * LANES + lane
    words = philox4x32(
        (counter & 0xFFFFFFFF, key.bucket & 0xFFFFFFFF, int(stream) << 24 | slot, key.seed >> 32),
        (key.seed & 0xFFFFFFFF, key.step & 0xFFFFFFFF),
    )
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(-1, SUPER_GROUP)


def scale_draws(key: Key, super_groups: Tensor, *, slot: int) -> Tensor:
    """16-bit draws for every group, the first 16 of the scale stream: int64 [m, 16]."""
    return draws(key, super_groups, slot=slot, stream=Stream.SCALE)[:, :GROUPS]


def van_der_corput(n: int) -> tuple[int, ...]:
    """The ranks of 0..n-1 ordered by the base-2 radical inverse: neighbours in the order lie far apart.

    Source: van der Corput (1935).

    >>> van_der_corput(4)
    (0, 2, 1, 3)
    """
    bits = max(n - 1, 1).bit_length()
    inverse = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(n)]
    ranks = {value: rank for rank, value in enumerate(sorted(inverse))}
    return tuple(ranks[value] for value in inverse)


def stratum(slot: int, workers: int) -> tuple[int, int]:
    """Start and width, in units of 2**-16, of the stratum that correlated rounding gives to a slot."""
    return van_der_corput(workers)[slot] * RESOLUTION // workers, RESOLUTION // workers


def thresholds(config: CodecConfig, key: Key, super_groups: Tensor, *, slot: int, workers: int) -> Tensor:
    """The threshold u of every coordinate: float32 [m, 256], odd multiples of 2**-16 in (0, 1)."""
    u = draws(key, super_groups, slot=slot)
    if config.rounding == "correlated":
        start, width = stratum(slot, workers)
        # By whole strata: a common shift inside the strata would not cancel in the sum over the slots.
        rotation = (draws(key, super_groups, slot=0, stream=Stream.ROTATION) * workers >> 16) * width
        u = (rotation + start + (u * width >> 16)) & 0xFFFF
    return centred(u)


def centred(draw: Tensor) -> Tensor:
    """16-bit draws as float32 in (0, 1), odd multiples of 2**-16 and so symmetric about 1/2.

    The lowest bit is set instead of adding a half: the draw, put into the mantissa of a float, is then exact in one
    subtraction, and so is its sum with the centre of any width.
    """
    return (draw | 1).to(torch.float32) * (1.0 / RESOLUTION)
