"""The plan in five kernels and two sorts, equal to `dynamiq_core.plan`, which says why it is made so.

Torch needs about a hundred and sixty operations for it, and on a GPU each of them costs a launch, far more than its
work on as few numbers as these.

Shapes: d coordinates, M super-groups, C chunks, K super-groups in the longest chunk. A lane has a super-group.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynamiq_core.config import MAX_WIDTH, CodecConfig
from dynamiq_core.packing import PLANE
from dynamiq_core.plan import MEAN_SHARE, RESIDUAL_SHARE, DynamiQPlan, PlanTerms, plan_terms
from dynamiq_core.rounding import Key
from dynamiq_kernels.triton.lanes import bits, floating
from dynamiq_kernels.triton.launch import INTERPRETED, check, launch

SUPER_GROUPS = 4096 if INTERPRETED else 256
"""Super-groups that a program works on at a time."""

STEPS = 8
"""Most steps of a hull: from width 0 to width 8."""

RUNGS = 16
"""Integers in a chunk's row of rungs: 1 + STEPS, padded."""

KEYS = 16
"""Numbers that a chunk has for its widths in the keys that super-groups are sorted by."""

_STEPS, _RUNGS = tl.constexpr(STEPS), tl.constexpr(RUNGS)
_MAX_WIDTH, _PLANE, _KEYS = tl.constexpr(MAX_WIDTH), tl.constexpr(PLANE), tl.constexpr(KEYS)
_MEAN_SHARE, _RESIDUAL_SHARE = tl.constexpr(MEAN_SHARE), tl.constexpr(RESIDUAL_SHARE)

SIZES = ["numel", "workers", "count", "chunks", "longest", "base", "halvings", "digits"]
"""Arguments whose values kernels are not compiled for."""


@triton.jit
def finite(x):
    """Whether float32 or float64 are neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["statistics"])
def energies_kernel(
    statistics, mean, residual, largest, count, numel, workers, SUBTRACT: tl.constexpr, SG: tl.constexpr
):
    """The means to subtract, float32 [count], the energies that remain, float64 [count], and the bits of the largest.

    Args:
        statistics: int16 [count, 2], the bits of bfloat16.
        mean: out.
        residual: out.
        largest: int64 [1], 0 before. Floats that are not negative are ordered like their bits.
        count: super-groups M.
        numel: coordinates d.
        workers: ranks n.
        SUBTRACT: whether means that are finite may be subtracted.
        SG: super-groups at a time.
    """
    most = tl.zeros([SG], tl.int64)
    for first in range(tl.program_id(0) * SG, count, tl.num_programs(0) * SG):
        j = first + tl.arange(0, SG)
        within = j < count
        number = tl.minimum(numel - j.to(tl.int64) * 256, 256)
        share = (number * workers).to(tl.float64)
        value = floating(tl.load(statistics + 2 * j, mask=within, other=0).to(tl.int32) << 16)
        rms = floating(tl.load(statistics + 2 * j + 1, mask=within, other=0).to(tl.int32) << 16)
        energy = rms.to(tl.float64) * rms.to(tl.float64) * number.to(tl.float64)
        value = tl.math.div_rn(value, tl.zeros([SG], tl.float32) + workers)
        # Of an energy that overflowed nothing is known: it is as good as non-finite.
        value = tl.where(finite(rms) & (value == value), value, float("nan"))  # also one NaN for all
        square = value.to(tl.float64) * value.to(tl.float64)
        pays = (share * square >= energy * _MEAN_SHARE) & (value != 0.0) & SUBTRACT
        value = tl.where(pays | (finite(value) == 0), value, 0.0)
        rest, least = energy - share * square, energy * _RESIDUAL_SHARE
        left = tl.where(value != 0.0, tl.where(rest < least, least, rest), energy)
        left = tl.where(finite(left) & within, left, 0.0)
        tl.store(mean + j, value, mask=within)
        tl.store(residual + j, left, mask=within)
        most = tl.maximum(most, left.to(tl.int64, bitcast=True))
    tl.atomic_max(largest, tl.max(most, axis=0), sem="relaxed")  # read by the next kernel and not before


@triton.jit(do_not_specialize=SIZES)
def relative_kernel(residual, largest, relative, count, SG: tl.constexpr):
    """Energies relative to the largest one: float32 [count]."""
    divisor = tl.load(largest).to(tl.float64, bitcast=True)
    divisor = tl.where(divisor > 0.0, divisor, 1.0)
    for first in range(tl.program_id(0) * SG, count, tl.num_programs(0) * SG):
        j = first + tl.arange(0, SG)
        within = j < count
        part = tl.load(residual + j, mask=within, other=0.0) / divisor
        tl.store(relative + j, part.to(tl.float32), mask=within)


@triton.jit
def reaching(falling, chunk, chunks, low, high, gain, bound, halvings):
    """How many of a chunk's super-groups take a step, where keys from ``bound`` up do: int32 like ``low``.

    Args:
        falling: float32 [M], relative energies of all super-groups, largest first; every C-th is of this chunk.
        chunk: which chunk.
        chunks: C.
        low: int32, the least that it can be.
        high: int32, the most.
        gain: float32, of the step.
        bound: int64, bits of a float32 that is not negative.
        halvings: of what lies between, until nothing does.
    """
    for _ in range(halvings):
        middle = (low + high) >> 1
        apart = low < high
        key = bits(tl.load(falling + middle * chunks + chunk, mask=apart, other=0.0) * gain).to(tl.int64)
        low = tl.where(apart & (key >= bound), middle + 1, low)
        high = tl.where(apart & (key < bound), middle, high)
    return low


@triton.jit
def bit_length(x):
    """Bits of a scalar int32 that is not negative, or one more if it is large."""
    return (bits(x.to(tl.float32)) >> 23) - 126


@triton.jit(do_not_specialize=SIZES)
def rungs_kernel(
    falling, sizes, gains, prices, rises, rungs, scales_at, nonzero, count, chunks, base, halvings, digits,
    DROP: tl.constexpr, SG: tl.constexpr,
):  # fmt: skip
    """Of each chunk, how many super-groups are sent, and how many of them take each step; what follows from that.

    Args:
        falling: float32 [M], relative energies, largest first.
        sizes: int64 [C], bytes of the messages.
        gains: float32 [8], gain per byte of every step, 0 where there is none.
        prices: int64 [8], bytes of every step, 0 where there is none.
        rises: int32 [9], the lowest width, and by how much every step is wider.
        rungs: int32 [C, 16], out: super-groups sent, then those that take each step.
        scales_at: int32 [C], out: bytes of all planes.
        nonzero: int32 [C], out: super-groups of a width above 0.
        count: super-groups M.
        chunks: C.
        base: bytes of a super-group of the lowest width.
        halvings: of K, as for `reaching`.
        digits: of five bits in the largest key.
        DROP: whether super-groups without energy are not sent.
        SG: chunks at a time, 1.
    """
    step = tl.arange(0, _STEPS)
    digit = tl.arange(0, 32)
    gain, price = tl.load(gains + step), tl.load(prices + step)
    none = tl.zeros([_STEPS, 32], tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        members = (count - chunk + chunks - 1) // chunks
        sent = members
        if DROP:
            zero = tl.zeros([1], tl.int32)
            sent = tl.max(reaching(falling, chunk, chunks, zero, zero + members, 1.0, 1, halvings), axis=0)
        capacity = tl.load(sizes + chunk) - sent.to(tl.int64) * base
        # The largest bound whose keys do not fit, found five bits at a time; 0 where all fit.
        below = tl.zeros([1], tl.int64)
        taken = tl.zeros([_STEPS], tl.int32)  # have keys from the least bound up that is known to fit
        reach = taken + members  # have keys from ``below`` up
        for i in range(digits):
            shift = 5 * (digits - 1 - i)
            bounds = below + (digit.to(tl.int64) << shift)
            between = bit_length(tl.max(reach - taken, axis=0))
            low, high = none + taken[:, None], none + reach[:, None]
            found = reaching(falling, chunk, chunks, low, high, gain[:, None], bounds[None, :], between)
            spent = tl.sum(found.to(tl.int64) * price[:, None], axis=0)
            last = tl.sum(((spent > capacity) & (digit > 0)).to(tl.int32), axis=0)
            below += last.to(tl.int64) << shift
            reach = tl.sum(tl.where((digit == last)[None, :], found, 0), axis=1)
            taken = tl.where(last < 31, tl.sum(tl.where((digit == last + 1)[None, :], found, 0), axis=1), taken)
        left = capacity - tl.sum(taken.to(tl.int64) * price, axis=0)
        # The ties just below, step by step and in order, while they fit.
        ties = tl.where(below > 0, reach - taken, 0)
        asked = ties.to(tl.int64) * price
        room = tl.maximum(left - (tl.cumsum(asked, axis=0) - asked), 0).to(tl.int32)  # of a message, which has 31 bits
        taken += tl.minimum(ties, room // tl.maximum(price, 1).to(tl.int32))
        lowest = tl.load(rises)
        planes = sent * lowest + tl.sum(taken * tl.load(rises + 1 + step), axis=0)
        positive = tl.where(lowest > 0, sent, tl.max(taken, axis=0))
        tl.store(rungs + chunk * _RUNGS, sent)
        tl.store(rungs + chunk * _RUNGS + 1 + step, taken)
        tl.store(scales_at + chunk, planes * _PLANE)
        tl.store(nonzero + chunk, positive)


@triton.jit
def width_and_offset(rungs, rises, chunk, k):
    """Width and first byte of the planes of the k-th super-group of a chunk, by falling width."""
    width, planes = k * 0, k * 0
    for t in tl.static_range(_STEPS + 1):
        rung, rise = tl.load(rungs + chunk * _RUNGS + t), tl.load(rises + t)
        width += tl.where(k < rung, rise, 0)
        planes += tl.minimum(k, rung) * rise
    return width, planes * _PLANE


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(order, rungs, rises, keys, count, chunks, SG: tl.constexpr):
    """What super-groups are sorted by, [M] in the order of memory: their chunk, and in it falling width.

    Args:
        order: int64 [M], super-groups by falling energy, which are dealt to the chunks in turn.
        rungs: int32 [C, 16], as from `rungs_kernel`.
        rises: int32 [9], as for it.
        keys: integers [M], out.
        count: super-groups M.
        chunks: C.
        SG: super-groups at a time.
    """
    for first in range(tl.program_id(0) * SG, count, tl.num_programs(0) * SG):
        dealt = first + tl.arange(0, SG)
        within = dealt < count
        chunk = dealt % chunks
        width, _ = width_and_offset(rungs, rises, chunk, dealt // chunks)
        index = tl.load(order + dealt, mask=within, other=0)
        tl.store(keys + index, (chunk * _KEYS + _MAX_WIDTH - width).to(keys.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    members, rungs, rises, mean, residual, shares, rows, energies, errors, count, chunks, longest, SG: tl.constexpr
):  # fmt: skip
    """Rows, energies and expected errors of a plan, in the order of the messages.

    Args:
        members: int64 [M], super-groups of the first chunk by falling width and then by index, then of the next.
        rungs: int32 [C, 16], as from `rungs_kernel`.
        rises: int32 [9], as for it.
        mean: float32 [M], as from `energies_kernel`.
        residual: float64 [M], from the same.
        shares: float64 [9], expected squared error relative to the energy, by width.
        rows: int32 [C, K, 4], out.
        energies: float64 [C, K], out.
        errors: float64 [C, K], out.
        count: super-groups M.
        chunks: C.
        longest: K.
        SG: super-groups at a time.
    """
    places = chunks * longest
    for first in range(tl.program_id(0) * SG, places, tl.num_programs(0) * SG):
        at = first + tl.arange(0, SG)
        within = at < places
        chunk = tl.minimum(at, places - 1) // longest
        k = at - chunk * longest
        least, more = count // chunks, count % chunks  # super-groups of every chunk, and how many chunks have one more
        present = within & (k < least + (chunk < more).to(tl.int32))
        index = tl.load(members + chunk * least + tl.minimum(chunk, more) + k, mask=present, other=0).to(tl.int32)
        width, offset = width_and_offset(rungs, rises, chunk, k)
        energy = tl.load(residual + index, mask=present, other=0.0)
        subtracted = bits(tl.load(mean + index, mask=present, other=0.0))
        row = rows + at.to(tl.int64) * 4
        tl.store(row, tl.where(present, index, -1), mask=within)
        tl.store(row + 1, width, mask=within)
        tl.store(row + 2, offset, mask=within)
        tl.store(row + 3, subtracted, mask=within)
        tl.store(energies + at, energy, mask=within)
        tl.store(errors + at, energy * tl.load(shares + width), mask=within)


class Common(NamedTuple):
    """What the plans of all tensors of one size have in common, and its tables on the device."""

    plan: PlanTerms
    digits: int  # of five bits in the largest key, which is the largest gain
    sizes: Tensor  # int64 [C]
    gains: Tensor  # float32 [8]
    prices: Tensor  # int64 [8]
    rises: Tensor  # int32 [9]
    shares: Tensor  # float64 [9]


@lru_cache(maxsize=1024)
def _common(config: CodecConfig, numel: int, chunks: int, gain: float, device: torch.device) -> Common:
    """The terms of plans; copied while the host waits, once, since plans are made on more than one stream."""
    plan = plan_terms(config, numel, chunks, gain)
    padding = [0] * (STEPS - len(plan.steps))
    widths = [0, plan.lowest, *(step.width for step in plan.steps)]
    tables = {
        "sizes": torch.tensor(plan.sizes, dtype=torch.int64),
        "gains": torch.tensor([*(step.gain for step in plan.steps), *padding], dtype=torch.float32),
        "prices": torch.tensor([*(step.bytes for step in plan.steps), *padding], dtype=torch.int64),
        "rises": torch.tensor([*(b - a for a, b in pairwise(widths)), *padding], dtype=torch.int32),
        "shares": torch.tensor(plan.errors, dtype=torch.float64),
    }
    digits = -(-int(tables["gains"].max().view(torch.int32)).bit_length() // 5)
    return Common(plan, digits, **{name: table.to(device) for name, table in tables.items()})


def make_plan(
    statistics: Tensor, numel: int, *, config: CodecConfig, key: Key, workers: int, chunks: int, gain: float
) -> DynamiQPlan:
    """The plan; see `dynamiq_core.plan.make_plan`."""
    check([statistics])
    device = statistics.device
    plan, digits, sizes, gains, prices, rises, shares = _common(config, numel, chunks, gain, device)
    count, longest = len(statistics), plan.lengths[0]
    places = chunks * longest
    # Every vector by itself: where one starts inside an allocation, kernels are compiled once more for its alignment.
    mean = torch.empty(count, dtype=torch.float32, device=device)
    residual, relative = torch.empty_like(mean, dtype=torch.float64), torch.empty_like(mean)
    largest = torch.zeros(1, dtype=torch.int64, device=device)
    launch(
        energies_kernel, count, device, at_a_time=SUPER_GROUPS,
        statistics=statistics.contiguous().view(torch.int16), mean=mean, residual=residual, largest=largest,
        count=count, numel=numel, workers=workers, SUBTRACT=config.subtract_mean,
    )  # fmt: skip
    launch(
        relative_kernel, count, device, at_a_time=SUPER_GROUPS,
        residual=residual, largest=largest, relative=relative, count=count,
    )  # fmt: skip
    falling, order = torch.sort(relative, descending=True, stable=True)
    rungs = torch.empty(chunks, RUNGS, dtype=torch.int32, device=device)
    scales_at = torch.empty(chunks, dtype=torch.int32, device=device)
    nonzero = torch.empty_like(scales_at)
    launch(
        rungs_kernel, chunks, device, at_a_time=1, warps=1,
        falling=falling, sizes=sizes, gains=gains, prices=prices, rises=rises,
        rungs=rungs, scales_at=scales_at, nonzero=nonzero,
        count=count, chunks=chunks, base=plan.base, halvings=longest.bit_length(), digits=digits,
        DROP=config.widths[0] == 0,
    )  # fmt: skip
    narrow = chunks * KEYS <= torch.iinfo(torch.int16).max
    keys = torch.empty(count, dtype=torch.int16 if narrow else torch.int32, device=device)
    launch(
        keys_kernel, count, device, at_a_time=SUPER_GROUPS,
        order=order, rungs=rungs, rises=rises, keys=keys, count=count, chunks=chunks,
    )  # fmt: skip
    members = torch.sort(keys, stable=True).indices
    rows = torch.empty(chunks, longest, 4, dtype=torch.int32, device=device)
    energies = torch.empty(chunks, longest, dtype=torch.float64, device=device)
    errors = torch.empty_like(energies)
    launch(
        rows_kernel, places, device, at_a_time=SUPER_GROUPS,
        members=members, rungs=rungs, rises=rises, mean=mean, residual=residual, shares=shares,
        rows=rows, energies=energies, errors=errors, count=count, chunks=chunks, longest=longest,
    )  # fmt: skip
    return DynamiQPlan(
        config=config,
        key=key,
        workers=workers,
        numel=numel,
        sizes=plan.sizes,
        lengths=plan.lengths,
        mean=mean,
        rows=rows,
        scales_at=scales_at,
        nonzero=nonzero,
        energies=energies,
        errors=errors,
    )
