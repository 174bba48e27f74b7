"""Phase 1: mean and root mean square of every super-group, small enough to exchange uncompressed.

Both are sums of integers relative to the super-group's largest exponent, so they do not depend on the order of
summation: every backend and thread count gets the same bits, and values from 1e-30 to 1e30 neither underflow nor
overflow. On the wire they are bfloat16 (0.125 bits per coordinate): the mean is only a value that everybody
subtracts and adds back, and the root mean square only steers the allocation. The root is sent instead of the
squared norm because squares of float32 gradients leave the range of bfloat16.

Shapes: d coordinates, M super-groups; the last one may be partly filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP

MEAN_BITS = 21
"""A mean is summed in units of 2**-21 of the largest exponent, 256 of them in 31 bits."""

SQUARE_SHIFT = 11
"""Squares are summed in units of 2**-10 of the largest exponent, 256 of them in 31 bits."""

BYTES = 4
"""Bytes of statistics per super-group on the wire."""


def super_groups(numel: int) -> int:
    """Number of super-groups M of ``numel`` coordinates."""
    return -(-numel // SUPER_GROUP)


def as_super_groups(x: Tensor) -> Tensor:
    """``x`` [d] as float32 [M, 256], the tail filled with zeros."""
    padding = super_groups(x.numel()) * SUPER_GROUP - x.numel()
    return torch.nn.functional.pad(x.to(torch.float32), (0, padding)).view(-1, SUPER_GROUP)


def counts(numel: int, device: torch.device) -> Tensor:
    """Real coordinates of each super-group: int32 [M]."""
    first = torch.arange(super_groups(numel), dtype=torch.int64, device=device) * SUPER_GROUP
    return (numel - first).clamp(max=SUPER_GROUP).to(torch.int32)


def statistics(x: Tensor) -> Tensor:
    """Mean and root mean square of every super-group of one worker's gradient.

    Args:
        x: float32, bfloat16 or float16 [d].

    Returns:
        bfloat16 [M, 2]. A super-group with a NaN or an infinity has NaN for both.
    """
    values = as_super_groups(x)
    count = counts(x.numel(), x.device).to(torch.float32)
    exponent = (values.abs().view(torch.int32) >> 23).amax(dim=1)  # 255 marks a NaN or an infinity
    # unit = 2**-(21 - exponent); the clamps keep it and its inverse normal numbers.
    biased = (254 + MEAN_BITS - exponent).clamp(max=253)
    scale = (biased << 23).view(torch.float32)
    unit = ((254 - biased) << 23).view(torch.float32)
    q = torch.round(values * scale[:, None]).nan_to_num(0.0, 0.0, 0.0).to(torch.int32)
    mean = q.sum(dim=1).to(torch.float32) / count * unit
    r = q + (1 << (SQUARE_SHIFT - 1)) >> SQUARE_SHIFT
    rms = _root((r * r).sum(dim=1).to(torch.float32) / count) * (unit * 2.0**SQUARE_SHIFT)
    rows = torch.stack((mean, rms), dim=1)
    return torch.where((exponent == 255)[:, None], torch.nan, rows).to(torch.bfloat16)


def _root(x: Tensor) -> Tensor:
    """Square root of float32, correctly rounded.

    On CPUs torch leaves it to MKL, whose last bit is another one for every fifth number. Of float64 MKL's last bit does
    not matter: no root of a float32 number is that near to the middle between two float32 numbers.
    """
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def squared_norms(x: Tensor) -> Tensor:
    """Squared norm of every super-group of ``x`` [d]: float64 [M], computed in float32."""
    full = x.numel() // SUPER_GROUP * SUPER_GROUP
    norms: Tensor = torch.linalg.vector_norm(x[:full].view(-1, SUPER_GROUP), dim=1, dtype=torch.float32)
    if full < x.numel():
        norms = torch.cat((norms, torch.linalg.vector_norm(x[full:], dtype=torch.float32)[None]))
    return norms.to(torch.float64).square()


def merge_statistics(parts: Sequence[Tensor]) -> Tensor:
    """Statistics of several workers together: means add up, root mean squares add up as squares.

    Args:
        parts: bfloat16 [m, 2] each, at least one.

    Returns:
        bfloat16 [m, 2]: sum of the means, root of the summed mean squares.
    """
    every = torch.stack([part.to(torch.float64) for part in parts])
    mean, square = every[..., 0].sum(dim=0), every[..., 1].square().sum(dim=0)
    # Through float32, as every backend converts from there.
    return torch.stack((mean, square.sqrt()), dim=-1).to(torch.float32).to(torch.bfloat16)
