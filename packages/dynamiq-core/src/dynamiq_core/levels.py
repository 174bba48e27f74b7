"""Non-uniform levels: where a w-bit code lies on [-1, 1], and which code a value takes.

The 2**w levels are odd-symmetric, have no wasted second zero, and end at +-1. The inner half of the codes lies
densely, the outer half ``bend`` times as far apart: entries of a group cluster around zero. Both directions are one
minimum or maximum of two straight lines, so an encoder needs neither a square root nor a search, and every backend
can do the same float32 operations in the same order.

Positions: code k sits at p = k; the centre of the range is h = (2**w - 1) / 2, and m = k - h is a half-integer.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dynamiq_core.config import MAX_WIDTH

COLUMNS = ("centre", "inner", "outer", "shift", "inner_gap", "outer_gap", "offset", "dither")
"""Columns of `level_table`, in order."""


@lru_cache(maxsize=64)
def level_table(bend: float) -> Tensor:
    """Constants of every width: float32 [9, 8] on the CPU, row = width, columns as in `COLUMNS`.

    For |y| in [0, 1] the distance from the centre is z = min(|y| * inner, |y| * outer + shift), in codes.
    For a distance |m| the level is max(|m| * inner_gap, |m| * outer_gap - offset).
    ``dither`` is the gap by which a shared dither is scaled when it is subtracted: for any value the estimate stays
    unbiased; the variance is gap**2 / 12 + (gap - dither)**2 / 12, least for a typical gap.
    """
    table = torch.zeros(MAX_WIDTH + 1, len(COLUMNS), dtype=torch.float64)
    for width in range(1, MAX_WIDTH + 1):
        centre = (2**width - 1) / 2
        knee = max(2.0 ** (width - 2) - 0.5, 0.0)  # the bend lies on a level: no cell straddles it
        inner = bend * (centre - knee) + knee
        outer = inner / bend
        shift = centre - outer
        dither = _typical_gap(bend) / centre
        table[width] = torch.tensor(
            [centre, inner, outer, shift, 1 / inner, 1 / outer, shift / outer, dither], dtype=torch.float64
        )
    return table.to(torch.float32)


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
    return level_of(codes, level_table(bend)[width : width + 1])[0]


def positions(y: Tensor, rows: Tensor) -> Tensor:
    """Signed distance from the centre, in codes: float32 like ``y``.

    Args:
        y: float32 [m, k], values in [-1, 1].
        rows: float32 [m, 8], the rows of `level_table` for the widths of the m super-groups.
    """
    _, inner, outer, shift, *_ = rows.unsqueeze(1).unbind(-1)
    magnitude = y.abs()
    return torch.copysign(torch.minimum(magnitude * inner, magnitude * outer + shift), y)


def level_of(codes: Tensor, rows: Tensor) -> Tensor:
    """The level of each code: float32 [m, k] for integer codes [m, k] and rows as in `positions`."""
    centre, _, _, _, inner_gap, outer_gap, offset, _ = rows.unsqueeze(1).unbind(-1)
    m = codes.to(torch.float32) - centre
    magnitude = m.abs()
    return torch.copysign(torch.maximum(magnitude * inner_gap, magnitude * outer_gap - offset), m)
