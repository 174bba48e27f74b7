"""Multiply and add with one rounding, as processors do in one instruction.

Torch has no such operation on CPUs, and a kernel that rounds the product as well would not give the same bits. So the
reference computes it from sums that are exact in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors, which broadcast, rounded once to float32.

    The product is exact in float64. The sum there is rounded *to odd*: where it is not exact, the neighbour whose last
    bit is set stands for everything between it and its other neighbours, so that rounding once more, to fewer bits,
    goes where the exact sum would go. Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums:
    proved algorithms using rounding to odd" (IEEE Transactions on Computers, 2008).
    """
    product, addend = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    )
    total = product + addend
    share = total - product
    lost = (product - (total - share)) + (addend - share)  # what the sum has rounded off, exactly (Knuth's two-sum)
    bits = total.view(torch.int64)
    away = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = torch.isfinite(lost) & (lost != 0) & ((bits & 1) == 0)
    return torch.where(inexact, bits + away, bits).view(torch.float64).to(torch.float32)
