"""Phase 1: mean and root mean square of every super-group, equal to `dynamiq_core.statistics`."""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynamiq_core.statistics import MEAN_BITS, SQUARE_SHIFT, super_groups
from dynamiq_kernels.triton.gradients import lanes_within, load, round_to_bfloat16, tail_of
from dynamiq_kernels.triton.lanes import bits, floating, largest_bits
from dynamiq_kernels.triton.launch import check, launch

_BIASED = tl.constexpr(254 + MEAN_BITS)
_SHIFT = tl.constexpr(SQUARE_SHIFT)
_STEP = tl.constexpr(2.0**SQUARE_SHIFT)
_HALF_STEP = tl.constexpr(1 << (SQUARE_SHIFT - 1))
_ROUNDER = tl.constexpr(1.5 * 2**23)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_NAN = tl.constexpr(0x7FC07FC0)


@triton.jit(do_not_specialize=["count", "numel"])
def statistics_kernel(x, out, count, numel, TAIL: tl.constexpr, SG: tl.constexpr):
    """Rows of ``count`` super-groups of ``x`` [numel] into ``out``, two bfloat16 in one int32 each."""
    lane = tl.arange(0, 32)[None, :]
    for first in range(tl.program_id(0) * SG, count, tl.num_programs(0) * SG):
        j = tl.minimum(first + tl.arange(0, SG)[:, None], count - 1)
        within = lanes_within((j * 32 + lane).to(tl.uint32, bitcast=True), numel, TAIL)
        values = load(x, j, within, numel, TAIL)
        values = tl.where(within[None], values, 0.0)
        exponent = tl.max(largest_bits(values), axis=1)[:, None] >> 23  # 255 marks a NaN or an infinity
        # unit = 2**-(21 - exponent); the clamp keeps it and its inverse normal numbers.
        biased = tl.minimum(-exponent + _BIASED, 253)
        unit = floating((254 - biased) << 23)
        # The sum with the rounder has the nearest integer in its low bits.
        q = bits(values * floating(biased << 23)[None] + _ROUNDER) - _ROUNDER_BITS
        r = (q + _HALF_STEP) >> _SHIFT
        total = tl.sum(tl.sum(q, axis=0), axis=1)[:, None]
        squares = tl.sum(tl.sum(r * r, axis=0), axis=1)[:, None]
        number = tl.minimum(numel - j.to(tl.int64) * 256, 256).to(tl.float32)
        mean = tl.math.div_rn(total.to(tl.float32), number) * unit
        rms = tl.math.sqrt_rn(tl.math.div_rn(squares.to(tl.float32), number)) * (unit * _STEP)
        row = (round_to_bfloat16(mean) | round_to_bfloat16(rms) << 16).to(tl.int32, bitcast=True)
        row = tl.where(exponent == 255, _NAN, row)
        tl.store(out + j + tl.zeros([SG, 32], tl.int32), tl.broadcast_to(row, [SG, 32]), mask=lane == 0)


def statistics(x: Tensor) -> Tensor:
    """Mean and root mean square of every super-group; see `dynamiq_core.statistics.statistics`."""
    check([x])
    count = super_groups(x.numel())
    out = torch.empty(count, 2, dtype=torch.bfloat16, device=x.device)
    launch(
        statistics_kernel, count, x.device,
        x=x, out=out.view(torch.int32), count=count, numel=x.numel(), TAIL=tail_of(x.numel()),
    )  # fmt: skip
    return out
