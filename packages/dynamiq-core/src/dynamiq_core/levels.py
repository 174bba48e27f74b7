"""Non-uniform levels: where a w-bit code lies on [-1, 1], and which code a value takes.

The 2**w levels are odd-symmetric, have no wasted second zero, and end at +-1. The inner half of the codes lies
densely, the outer half ``bend`` times as far apart: entries of a group cluster around zero. Both directions are one
minimum or maximum of two straight lines, so an encoder needs neither a square root nor a search, and every backend
can do the same float32 operations in the same order.

Positions: code k sits at p = k; the centre of the range is h = (2**w - 1) / 2, and m = k - h is a half-integer.
Distances from zero are measured in inner gaps: half-integers as far as the knee, steps of ``bend`` beyond it. The
constants have so few bits that distances are exact, and so is their product with a dither: a backend may fuse those
multiplications with the additions that follow and still gets the same bits. Where a fused operation and its two parts
differ, it is `dynamiq_core.fused.multiply_add` here and the processor's instruction in a kernel.

Entries reach 1 - 2**-21 rather than 1 (see `MARGIN`), and levels are that much farther apart when they are decoded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dynamiq_core.config import MAX_WIDTH
from dynamiq_core.fused import multiply_add

COLUMNS = ("centre", "inner", "outer", "shift", "gap", "bend", "offset", "dither")
"""Columns of `level_table`, in order."""

MARGIN = 1 - 2.0**-21
"""The largest entry. What is left to 1 holds the roundings on the way to a position, none of which may pass the centre:
the code beyond the last one does not exist."""

BEND_BITS = 12
"""Fractional bits of the bend: times a half-integer of 8 bits it is exact in float32."""

DITHER_BITS = 7
"""Fractional bits of the dither's gap: times a dither of 16 bits it is exact in float32."""


@lru_cache(maxsize=64)
def level_table(bend: float) -> Tensor:
    """Constants of every width: float32 [9, 8] on the CPU, row = width, columns as in `COLUMNS`.

    For |y| in [0, 1] the position is |m| = min(|y| * inner, |y| * outer + shift), at most the centre.
    The distance of a code from zero is max(|m|, |m| * bend - offset) inner gaps of size ``gap``, in units of the scale.
    ``dither`` is the number of inner gaps by which a shared dither is scaled when it is subtracted: for any value the
    estimate stays unbiased; the variance is gap**2 / 12 + (gap - dither)**2 / 12, least for a typical gap.
    """
    ratio = _rounded(bend, BEND_BITS)
    table = torch.zeros(MAX_WIDTH + 1, len(COLUMNS), dtype=torch.float32)
    for width in range(1, MAX_WIDTH + 1):
        centre = (2**width - 1) / 2
        knee = max(2.0 ** (width - 2) - 0.5, 0.0)  # the bend lies on a level: no cell straddles it
        inner = ratio * (centre - knee) + knee
        outer = torch.tensor(inner / ratio, dtype=torch.float32).item()
        shift = centre - outer  # exact: both lie within a factor of two, so y = 1 lands on the centre and not beyond
        dither = _rounded(_typical_gap(ratio) * inner / centre, DITHER_BITS)
        table[width] = torch.tensor(
            [centre, inner, outer, shift, 1 / (inner * MARGIN), ratio, (ratio - 1) * knee, dither], dtype=torch.float64
        )
    return table


def _rounded(value: float, bits: int) -> float:
    return float(round(value * 2**bits) / 2**bits)


def _typical_gap(bend: float) -> float:
    """Gap between levels where entries usually fall, relative to uniform levels; 1 when they are uniform."""
    inner_gap = 2 / (1 + bend)
    return inner_gap * (1 + 0.2 * (bend - 1))


def levels(width: int, bend: float) -> Tensor:
    """The levels of one width in increasing order: float32 [2**width].

    >>> levels(2, 1.5)
    tensor([-1.0000, -0.2500,  0.2500,  1.0000])
    """
    codes = torch.arange(2**width)[None]
    row = level_table(bend)[width : width + 1]
    return distances(codes, row)[0] / row[0, COLUMNS.index("inner")]


def positions(values: Tensor, inverse: Tensor, rows: Tensor) -> Tensor:
    """Signed distance from the centre, in codes: float32 like ``values``.

    Args:
        values: float32 [m, k].
        inverse: float32 [m, k], the factors that bring the values to [-1, 1].
        rows: float32 [m, 8], the rows of `level_table` for the widths of the m super-groups.
    """
    _, inner, outer, shift, *_ = rows.unsqueeze(1).unbind(-1)
    magnitude = values.abs()
    # Lines through the value rather than the entry: a product less for every coordinate.
    position = torch.minimum(magnitude * (inverse * inner), multiply_add(magnitude, inverse * outer, shift))
    return torch.copysign(position, values)


def distances(codes: Tensor, rows: Tensor) -> Tensor:
    """Signed distance of every code's level from zero, in inner gaps, exact.

    Args:
        codes: integers [m, k].
        rows: as in `positions`.

    Returns:
        float32 [m, k].
    """
    centre, _, _, _, _, bend, offset, _ = rows.unsqueeze(1).unbind(-1)
    m = codes.to(torch.float32) - centre
    magnitude = m.abs()
    return torch.copysign(torch.maximum(magnitude, magnitude * bend - offset), m)
