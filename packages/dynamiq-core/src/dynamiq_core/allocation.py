"""Which super-group gets how many bits: the greedy by gain per byte, under a fixed number of bytes per chunk.

Minimise sum_j F_j c(w_j) subject to sum_j cost(w_j) <= capacity. F_j is the energy of super-group j over all workers,
c(w) the error of the quantiser at width w relative to the energy, cost(w) its bytes. c is first replaced by its lower
convex hull over cost; then the steps of every super-group have falling gain per byte, and taking steps in the order
of gain is optimal up to the last step (Fox 1966; Shoham and Gersho 1988).

The result is a function of the energies alone: comparisons are made on float32 keys that every device computes with
the same operations, and equal keys are taken in order of position. Nothing is read on the host.

Shapes: C chunks, K super-groups per chunk (sorted by energy, largest first), T steps of the hull.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.config import CodecConfig
from dynamiq_core.constants import constant
from dynamiq_core.packing import PLANE
from dynamiq_core.scales import SUPER_BYTES, group_bytes


class Step(NamedTuple):
    """One step of the hull: to which width, for how many more bytes, at which gain per byte."""

    width: int
    bytes: int
    gain: float


def cost(width: int, config: CodecConfig) -> int:
    """Bytes of one super-group at a width: planes, group codes and super scale; nothing at width 0."""
    return PLANE * width + group_bytes(config.scales) + SUPER_BYTES if width else 0


def hull(config: CodecConfig, gain: float, *, floor: int = 0) -> tuple[int, tuple[Step, ...]]:
    """The lowest width and the steps above it on the lower convex hull of error over cost.

    Args:
        config: widths and kind of quantiser.
        gain: as for `chained_errors`.
        floor: narrower widths are left out.
    """
    errors = chained_errors(config, gain)
    points = [(cost(w, config), errors[w], w) for w in config.widths if w >= floor]
    kept: list[tuple[int, float, int]] = []
    for point in points:
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= 0:
        kept.pop()
    steps = tuple(Step(b[2], b[0] - a[0], _slope(a, b)) for a, b in pairwise(kept))
    return kept[0][2], steps


def _slope(a: tuple[int, float, int], b: tuple[int, float, int]) -> float:
    return (a[1] - b[1]) / (b[0] - a[0])


def allocate(energies: Tensor, capacities: Tensor, steps: Sequence[Step], lowest: int) -> Tensor:
    """Bit widths under a capacity for each chunk.

    A step's key is the energy times the step's gain, as float32. Steps are taken by falling key for as long as all of
    a key fit. Of the first key that does not fit as a whole, they are taken one by one, in step-major order: all
    super-groups' lowest step by position, then all their next. The first that does not fit ends the allocation: no
    later one is taken, even if it is cheaper.

    Args:
        energies: float32 [C, K], at least 0, falling along K; 0 gets the lowest width.
        capacities: int64 [C], bytes for the steps above the lowest width.
        steps: from `hull`.
        lowest: width before the first step.

    Returns:
        int32 [C, K] widths, falling along K.
    """
    chunks, device = energies.shape[0], energies.device
    if not steps:
        return torch.full(energies.shape, lowest, dtype=torch.int32, device=device)
    gains = constant([s.gain for s in steps], torch.float32, device)
    prices = constant([s.bytes for s in steps], torch.int64, device)
    keys = energies[:, None, :] * gains[:, None]  # [C, T, K]; falls along T and K
    threshold = _threshold(keys, prices, capacities)
    taken = keys >= threshold.view(torch.float32)[:, None, None]
    left = capacities - (taken.sum(dim=2) * prices).sum(dim=1)
    # The next lower key would exceed the capacity as a whole: take its ties in order while they fit.
    ties = keys == (threshold - 1).view(torch.float32)[:, None, None]
    spent = (ties * prices[:, None]).flatten(1).cumsum(dim=1).view(ties.shape)
    taken |= ties & (keys > 0) & (spent <= left[:, None, None])
    widths = constant([lowest, *(s.width for s in steps)], torch.int32, device)
    return widths[taken.sum(dim=1)].view(chunks, -1)


def _threshold(keys: Tensor, prices: Tensor, capacities: Tensor) -> Tensor:
    """The smallest positive float32, as its bits, such that all keys from there up fit: int32 [C].

    Non-negative floats are ordered like their bit patterns, which are found five bits at a time: a search by halves
    would take four times as many operations, and on a GPU each of them costs a launch.
    """
    steps, length = keys.shape[1:]
    rising = keys.view(torch.int32).flip(-1).to(torch.int64, memory_format=torch.contiguous_format)
    # What lies above a bound fits into the capacity if what lies below it saves the rest.
    excess = (length * prices.sum() - capacities)[:, None]
    digits = torch.arange(1, 32, device=keys.device)
    below = torch.zeros_like(capacities)[:, None]  # the largest bound that is known not to fit; zero is none
    for shift in range(30, -1, -5):
        bounds = torch.add(below, digits, alpha=1 << shift)
        count = torch.searchsorted(rising, bounds[:, None].expand(-1, steps, -1).contiguous())
        too_low = (count * prices[:, None]).sum(dim=1) < excess
        below = torch.add(below, too_low.sum(dim=1, keepdim=True), alpha=1 << shift)
    return (below[:, 0] + 1).to(torch.int32)


@lru_cache(maxsize=64)
def normalised_errors(config: CodecConfig) -> tuple[float, ...]:
    """c(w): squared error of one quantisation relative to the energy, for w = 0..8."""
    table = ERRORS[config.scales, config.rounding == "dithered"]
    return (1.0, *table)


def floors(config: CodecConfig, gain: float) -> tuple[int, ...]:
    """Widths that every super-group with energy should have at least: the best first, then those better than none.

    The squared error of the whole would give super-groups of little energy next to nothing, and drop the least. But
    optimisers that scale every parameter's step by its own gradient, such as Adam, train such parameters as much as all
    others, so for them the error counts relative to the super-group's own energy.

    Args:
        config: widths, tolerance and kind of quantiser.
        gain: as for `chained_errors`.

    Returns:
        The narrowest width whose error is within the tolerance, and the narrower ones whose error is not above the
        energy. Empty if everything is sent anyway, for want of width 0, or nothing has to be, with a tolerance of 1.
    """
    if config.widths[0] > 0 or config.tolerance >= 1:
        return ()
    errors = chained_errors(config, gain)
    useful = [w for w in config.widths[1:] if errors[w] <= 1]
    enough = next((i for i, w in enumerate(useful) if errors[w] <= config.tolerance), len(useful) - 1)
    return tuple(reversed(useful[: enough + 1]))


LARGEST_ERROR = 2.0**48
"""Where the errors of `chained_errors` end, so that products with them are finite in float32."""


@lru_cache(maxsize=64)
def chained_errors(config: CodecConfig, gain: float) -> tuple[float, ...]:
    """Squared error of a finished sum relative to the energies that went in, for w = 0..8.

    An encoding loses the share c of what it is given, and that is the gradients in it *and the errors of the encodings
    before*. So with every encoding on its way the energy of a gradient and its errors grows by 1 + c. On a ring of n,
    the gradients of a chunk pass 1, 2, ..., n encodings, and the sum loses

        mean over l = 1..n of (1 + c)**l - 1 = (1 + c) / c * ((1 + c)**n - 1) / n - 1.

    That is gain * c as long as n c is small, which it is not for few bits at many ranks: at 2 bits, 64 ranks lose a
    thousand times as much. Other schedules have their gain in place of the ring's, n = 2 gain - 1: within 10 % for the
    butterfly and the direct exchange.

    Without subtracted dither partial sums lie on levels, and the next encoding finds most entries close to one again.
    There it is gain * c: at 64 ranks, measured errors are 1.1 times that at 5 bits, and 3.5 times at 2 bits.

    Args:
        config: widths and kind of quantiser.
        gain: mean number of encodings that a gradient passes, which is the mean number of gradients in an encoded sum.

    Returns:
        Nine numbers up to `LARGEST_ERROR`. At width 0 it is 1: the energy is lost once, however many hops there are.
    """
    feeds = config.rounding == "dithered"
    return (1.0, *(_chained_error(c, gain) if feeds else gain * c for c in normalised_errors(config)[1:]))


def _chained_error(c: float, gain: float) -> float:
    longest = 2 * Decimal(gain) - 1
    if longest <= 1:
        return gain * c
    with localcontext(prec=40):
        # Decimal and not math: every rank needs the same bits, whatever its C library.
        growth = 1 + Decimal(c)
        error = growth / Decimal(c) * (growth**longest - 1) / longest - 1
        return float(min(error, Decimal(LARGEST_ERROR)))


ERRORS: dict[tuple[str, bool], tuple[float, ...]] = {
    ("log", True): (1.89, 0.189, 0.0350, 0.00757, 0.00176, 0.000427, 0.000105, 0.0000262),
    ("log", False): (4.31, 0.352, 0.0668, 0.0144, 0.00336, 0.000815, 0.000202, 0.0000502),
    ("linear", True): (1.60, 0.163, 0.0297, 0.00643, 0.00150, 0.000368, 0.0000946, 0.0000277),
    ("linear", False): (3.55, 0.294, 0.0538, 0.0117, 0.00273, 0.000664, 0.000168, 0.0000456),
}
"""c(1)..c(8) by kind of scales and whether the dither is subtracted, for normally distributed entries at the default
bend; a test derives them again."""
