"""Decompress and accumulate, for callers that keep a sum."""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dynamiq_core import DynamiQPlan
from dynamiq_kernels.triton.gradients import lanes_within, load, store, tail_of
from dynamiq_kernels.triton.hop import RANDOM
from dynamiq_kernels.triton.launch import check, chunk_of, launch, options_of
from dynamiq_kernels.triton.quantise import add_message, row_of


@triton.jit(
    do_not_specialize=["slot", "numel", *RANDOM],
    do_not_specialize_on_alignment=["scales_at", "nonzero", "message"],
)
def accumulate_kernel(
    message, slot, total, numel,
    rows, scales_at, nonzero, table, ratios, bend, less_one, seed_low, seed_high, step, bucket,
    TAIL: tl.constexpr, DITHERED: tl.constexpr, CORRELATED: tl.constexpr, LINEAR: tl.constexpr,
    FEWEST: tl.constexpr, SG: tl.constexpr,
):  # fmt: skip
    """Add what a message carries to float32 ``total``, in the super-groups of width above 0."""
    lane = tl.arange(0, 32)[None, :]
    random = (seed_low, seed_high, step, bucket)
    number = tl.load(nonzero)
    chunk = (table, ratios, bend, less_one, tl.load(scales_at), number)
    for first in range(tl.program_id(0) * SG, number, tl.num_programs(0) * SG):
        place = first + tl.arange(0, SG)[:, None]
        k = tl.minimum(place, number - 1)
        j, w, at, _ = row_of(rows, k)
        counter = (j * 32 + lane).to(tl.uint32, bitcast=True)
        within = lanes_within(counter, numel, TAIL)
        values = load(total, j, within, numel, TAIL)
        values, _ = add_message(values, message, k, w, at, counter, slot, 1.0, chunk, random, DITHERED, LINEAR, FEWEST)
        # Past the end nothing is written: the last super-group must be added once.
        store(total, values, j, within & (place < number), numel, TAIL)


def decompress_accumulate(message: Tensor, total: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int) -> None:
    """Add what a message carries to ``total`` (float32 [d], in place); see `dynamiq_core.reference`."""
    check([message, total], [message])
    if not message.numel():
        return
    launch(
        accumulate_kernel, plan.lengths[chunk], total.device,
        message=message, slot=slot, total=total, numel=plan.numel, **chunk_of(plan, chunk),
        TAIL=tail_of(plan.numel), **options_of(plan.config),
    )  # fmt: skip
