"""The hop: decompress, accumulate and recompress in one pass over memory; with nothing received it is compress."""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynamiq_core import DynamiQPlan, Received
from dynamiq_core.constants import constant
from dynamiq_core.scales import SUPER_BYTES, group_bytes
from dynamiq_kernels.triton.gradients import coordinates_within, lanes_within, load, tail_of
from dynamiq_kernels.triton.lanes import largest_bits
from dynamiq_kernels.triton.launch import check, chunk_of, launch, options_of, stratum_of
from dynamiq_kernels.triton.quantise import add_message, encode, row_of

_CLEARED = tl.constexpr(1024)

RANDOM = ["seed_low", "seed_high", "step", "bucket"]
SCALARS = ["size", "numel", "slot", "start", "part", "workers", "received", *RANDOM]
"""Arguments whose values kernels are not compiled for."""

ADDRESSES = ["scales_at", "nonzero", "out"]
"""Pointers whose alignment kernels are not compiled for."""

FEW = 2
"""Up to so many messages are arguments of a kernel of their own. More are listed in memory, since of each argument the
compiler keeps addresses in registers."""


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=ADDRESSES)
def hop_kernel(
    x, messages, slots, sources, received, out, size, slot, start, part, workers, numel,
    rows, scales_at, nonzero, table, ratios, bend, less_one, seed_low, seed_high, step, bucket,
    RECEIVED: tl.constexpr, TAIL: tl.constexpr, DITHERED: tl.constexpr, CORRELATED: tl.constexpr,
    LINEAR: tl.constexpr, PER_SUPER_GROUP: tl.constexpr, FEWEST: tl.constexpr, SG: tl.constexpr,
):  # fmt: skip
    """Encode a chunk of ``x`` plus RECEIVED messages into ``out`` [size].

    Where RECEIVED is -1 there are ``received`` messages, whose addresses stand in ``sources``, int64 [2, received], and
    below them their slots. Only super-groups of width above 0 are visited: they come first, and the others send
    nothing.
    """
    lane = tl.arange(0, 32)[None, :]
    random, stratum = (seed_low, seed_high, step, bucket), (start, part, workers)
    section, number = tl.load(scales_at), tl.load(nonzero)
    chunk = (table, ratios, bend, less_one, section, number)
    for first in range(tl.program_id(0) * SG, number, tl.num_programs(0) * SG):
        # Past the end the last super-group is done once more, and the same bytes are written again.
        k = tl.minimum(first + tl.arange(0, SG)[:, None], number - 1)
        j, w, at, mean = row_of(rows, k)
        counter = (j * 32 + lane).to(tl.uint32, bitcast=True)
        within = lanes_within(counter, numel, TAIL)
        values = load(x, j, within, numel, TAIL) - mean[None]
        if RECEIVED >= 0:
            for i in tl.static_range(RECEIVED):
                values, _ = add_message(
                    values, messages[i], k, w, at, counter, slots[i] >> 5, 1.0, chunk, random, DITHERED, LINEAR, FEWEST
                )
        else:
            for i in range(received):
                message = tl.load(sources + i).to(tl.pointer_type(tl.uint8))
                sender = tl.load(sources + received + i).to(tl.int32)
                values, _ = add_message(
                    values, message, k, w, at, counter, sender, 1.0, chunk, random, DITHERED, LINEAR, FEWEST
                )
        if TAIL == 2:
            values = tl.where(coordinates_within(j, numel), values, 0.0)
        maximum = tl.where(within, largest_bits(values), 0)
        encode(
            out, values, maximum, within, k, j, w, at, counter, slot, stratum, chunk, random,
            CORRELATED, LINEAR, FEWEST,
        )  # fmt: skip

    end = section + number * PER_SUPER_GROUP
    for first in range(end + tl.program_id(0) * _CLEARED, size, tl.num_programs(0) * _CLEARED):
        byte = first + tl.arange(0, _CLEARED)
        tl.store(out + byte, tl.zeros([_CLEARED], tl.uint8), mask=byte < size)


def tagged(slot: int) -> int:
    """A slot as a member of a tuple: values there that are 1 or multiples of 16 would have kernels of their own."""
    return slot << 5 | 2


def decompress_accumulate_recompress(
    received: Sequence[Received], x: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor
) -> None:
    """Encode a chunk of ``x`` plus the received messages; see `dynamiq_core.reference`.

    One kernel is compiled for none, for one, for two, and for all larger numbers of messages.
    """
    messages = tuple(message for message, _ in received)
    check([x, out, *messages], [out, *messages])
    if not out.numel():
        return
    few, sources = len(messages) <= FEW, None
    if not few:
        table = (*(message.data_ptr() for message in messages), *(s for _, s in received))
        sources = constant(table, torch.int64, x.device)
    launch(
        hop_kernel, plan.lengths[chunk], x.device,
        x=x, messages=messages if few else (), slots=tuple(tagged(s) for _, s in received) if few else (),
        sources=sources, received=len(messages), out=out, size=out.numel(), slot=slot,
        numel=plan.numel, **stratum_of(plan, slot), **chunk_of(plan, chunk), RECEIVED=len(messages) if few else -1,
        TAIL=tail_of(plan.numel), PER_SUPER_GROUP=group_bytes(plan.config.scales) + SUPER_BYTES,
        **options_of(plan.config),
    )  # fmt: skip
