"""The codec's operations in plain torch: the specification against which every kernel is tested.

Float32 operations are written one by one, in the order in which every backend performs them. A product and the addition
that follows are one operation, `multiply_add`, where every backend must fuse them, and two where the product is exact
(see `dynamiq_core.levels`), so that no bit depends on it.

Shapes: d coordinates; m super-groups in the chunk at hand, of S = 256 coordinates in 16 groups of 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamiq_core import packing, scales
from dynamiq_core.config import GROUP, GROUPS, SUPER_GROUP
from dynamiq_core.fused import multiply_add
from dynamiq_core.levels import COLUMNS, distances, level_table, positions
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.plan import make_plan as make_plan
from dynamiq_core.protocol import Received
from dynamiq_core.rounding import scale_draws, thresholds
from dynamiq_core.statistics import as_super_groups
from dynamiq_core.statistics import statistics as statistics

name = "reference"


def decompress_accumulate_recompress(
    received: Sequence[Received], x: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor
) -> None:
    """Encode a chunk of ``x`` plus the received messages into ``out``.

    Args:
        received: messages of this chunk, added in the order given.
        x: float32, bfloat16 or float16 [d].
        plan: of this all-reduce.
        chunk: which chunk.
        slot: of this encoding.
        out: uint8 [plan.sizes[chunk]], overwritten.
    """
    values = chunk_values(x, plan, chunk)
    for message, sender_slot in received:
        values = add_message(values, message, plan, chunk=chunk, slot=sender_slot)
    encode(values, plan, chunk=chunk, slot=slot, out=out)


def decompress_accumulate(message: Tensor, total: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int) -> None:
    """Add what a message carries to ``total`` (float32 [d], in place), for callers that keep a sum.

    The subtracted means are not added: ``total`` is a sum of what is left of the gradients without them.
    """
    rows = as_super_groups(total)
    index = _index(plan, chunk)
    rows[index] = add_message(rows[index], message, plan, chunk=chunk, slot=slot)
    total.copy_(rows.flatten()[: plan.numel])


def finish(message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None:
    """Write the mean over the workers of a chunk's coordinates into ``out`` [d]; other chunks stay.

    A mean next to the largest number of a narrow dtype could be decoded as a larger one and become infinite, which a
    gradient scaler would take for an overflow. So what was sent as finite ends at that number.
    """
    index = _index(plan, chunk)
    mean = _mean(plan, chunk).expand(-1, SUPER_GROUP)
    mean = add_message(mean, message, plan, chunk=chunk, slot=slot, share=1 / plan.workers)
    if out.dtype != torch.float32:
        largest = torch.finfo(out.dtype).max
        sent_as_finite = torch.isfinite(_read_scales(message, plan, chunk=chunk)[:, :1])
        mean = torch.where(sent_as_finite, mean.clamp(-largest, largest), mean)  # NaN stays
    where = index[:, None] * SUPER_GROUP + torch.arange(SUPER_GROUP, device=out.device)
    # Coordinates of the padding go to one place past the end, which is then dropped.
    padded = torch.cat((out, out.new_zeros(1)))
    padded[where.clamp(max=plan.numel).flatten()] = mean.flatten().to(out.dtype)
    out.copy_(padded[:-1])


def chunk_values(x: Tensor, plan: DynamiQPlan, chunk: int) -> Tensor:
    """What a worker contributes to a chunk: float32 [m, 256], the gradient without the means."""
    index = _index(plan, chunk)
    return as_super_groups(x)[index] - _mean(plan, chunk)


def encode(values: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None:
    """Quantise and pack the super-groups of a chunk, float32 [m, 256]."""
    config, index, width = plan.config, _index(plan, chunk), _width(plan, chunk)
    real = index[:, None] * SUPER_GROUP + torch.arange(SUPER_GROUP, device=index.device) < plan.numel
    values = torch.where(real, values, 0.0)
    grouped = values.view(-1, GROUPS, GROUP)
    maxima = grouped.abs().amax(dim=2)  # NaN stays NaN
    draw = scale_draws(plan.key, index, slot=slot) if config.scales == "linear" else None
    coded = scales.encode_scales(maxima, config.scales, draw)

    rows = level_table(config.bend).to(values.device, non_blocking=True)[width]
    p = positions(values, coded.inverse.repeat_interleave(GROUP, dim=1), rows)
    u = thresholds(config, plan.key, index, slot=slot, workers=plan.workers)
    # round(p + u - 1/2) is floor(p + u); |p| <= centre and 0 < u < 1 keep it between 0 and 2 * centre.
    codes = torch.round(p + (u + (rows[:, :1] - 0.5)))
    codes = torch.where(torch.isfinite(coded.super_scale)[:, None], codes, 0.0).to(torch.uint8)

    out.zero_()
    packing.pack(codes, width, plan.offset[chunk, : len(index)], out)
    _write_scales(coded, plan, chunk=chunk, out=out)


def add_message(
    values: Tensor, message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, share: float = 1.0
) -> Tensor:
    """``values`` (float32 [m, 256]) plus what a message carries times ``share``."""
    config, index, width = plan.config, _index(plan, chunk), _width(plan, chunk)
    rows = level_table(config.bend).to(message.device, non_blocking=True)[width]
    codes = packing.unpack(message, width, plan.offset[chunk, : len(index)])
    distance = distances(codes, rows)
    if config.rounding == "dithered":
        u = thresholds(config, plan.key, index, slot=slot, workers=plan.workers)
        distance = distance - (u - 0.5) * _column(rows, "dither")
    # A number on the host would be rounded in another way.
    factor = torch.tensor(share, dtype=torch.float32)
    gap = _read_scales(message, plan, chunk=chunk) * factor * _column(rows, "gap")
    total = multiply_add(distance, gap.repeat_interleave(GROUP, dim=1), values)
    return torch.where((width > 0)[:, None], total, values)


def _write_scales(coded: scales.EncodedScales, plan: DynamiQPlan, *, chunk: int, out: Tensor) -> None:
    packed = scales.pack_codes(coded.codes, plan.config.scales)
    group_at, super_at = _scale_addresses(plan, chunk)
    padded = torch.cat((out, out.new_zeros(1)))
    padded[group_at.flatten()] = packed.flatten()
    padded[super_at.flatten()] = coded.super_scale.view(torch.uint8)
    out.copy_(padded[:-1])


def _read_scales(message: Tensor, plan: DynamiQPlan, *, chunk: int) -> Tensor:
    group_at, super_at = _scale_addresses(plan, chunk)
    padded = torch.cat((message, message.new_zeros(1)))
    super_scale = padded[super_at.flatten()].view(torch.bfloat16)
    codes = scales.unpack_codes(padded[group_at], plan.config.scales)
    return scales.decode_scales(super_scale, codes, plan.config.scales)


def _scale_addresses(plan: DynamiQPlan, chunk: int) -> tuple[Tensor, Tensor]:
    """Bytes of the group codes [m, 8 or 16] and of the super scales [m, 2]; one past the end where there are none."""
    size, per_group = plan.sizes[chunk], scales.group_bytes(plan.config.scales)
    k = torch.arange(plan.lengths[chunk], device=plan.index.device)[:, None]
    start, number = plan.scales_at[chunk], plan.nonzero[chunk]
    group_at = start + k * per_group + torch.arange(per_group, device=k.device)
    super_at = start + number * per_group + k * scales.SUPER_BYTES + torch.arange(scales.SUPER_BYTES, device=k.device)
    return torch.where(k < number, group_at, size), torch.where(k < number, super_at, size)


def _column(rows: Tensor, name: str) -> Tensor:
    column = COLUMNS.index(name)
    return rows[:, column : column + 1]


def _index(plan: DynamiQPlan, chunk: int) -> Tensor:
    return plan.index[chunk, : plan.lengths[chunk]].to(torch.int64)


def _width(plan: DynamiQPlan, chunk: int) -> Tensor:
    return plan.width[chunk, : plan.lengths[chunk]]


def _mean(plan: DynamiQPlan, chunk: int) -> Tensor:
    return plan.subtracted[chunk, : plan.lengths[chunk], None]
