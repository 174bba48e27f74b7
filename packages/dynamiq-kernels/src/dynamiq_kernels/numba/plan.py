"""The plan in a few sweeps over the statistics: equal to `dynamiq_core.plan`, which says why it is made so.

Torch needs about a hundred and sixty operations for it, each of which costs more than its work on as few numbers as
these.

Shapes: d coordinates, M super-groups, C chunks, K super-groups in the longest chunk, T steps of the hull.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamiq_core.config import MAX_WIDTH, SUPER_GROUP, CodecConfig
from dynamiq_core.packing import PLANE
from dynamiq_core.plan import MEAN_SHARE, RESIDUAL_SHARE, DynamiQPlan, PlanTerms, plan_terms
from dynamiq_core.rounding import Key
from dynamiq_kernels.numba.compiling import device, kernel
from dynamiq_kernels.numba.floats import from_bfloat16
from dynamiq_kernels.numba.memory import array_at, bits_of, stack

ZERO = np.float32(0.0)
NAN = np.float32(np.nan)
DIGIT = 11
"""Bits by which the energies are sorted at a time."""
VALUES = 1 << DIGIT
INFINITY_BITS = 0x7F800000
WIDTHS = MAX_WIDTH + 1


class Terms(NamedTuple):
    """What the plans of all tensors of one size have in common; tables are addresses."""

    numel: Any  # int64
    workers: Any  # int64
    chunks: Any  # int64
    subtract_mean: Any  # bool
    drop_empty: Any  # bool, whether super-groups without energy get width 0
    sizes: Any  # int64 [C], bytes of the messages
    base: Any  # int64, bytes of a super-group before the first step
    steps: Any  # int64, T
    gains: Any  # float32 [T]
    prices: Any  # int64 [T]
    widths: Any  # int64 [T + 1]
    errors: Any  # float64 [9], expected squared error relative to the energy, by width


class Tables(NamedTuple):
    """What a plan consists of; addresses."""

    mean: Any  # float32 [M]
    rows: Any  # int32 [C, K, 4]
    scales_at: Any  # int32 [C]
    nonzero: Any  # int32 [C]
    energies: Any  # float64 [C, K]
    errors: Any  # float64 [C, K]


@device
def _energies(statistics: Any, terms: Any, mean: Any, residual: Any, relative: Any) -> None:
    """The mean to subtract, the energy that remains, and that relative to the largest one."""
    rows = array_at(statistics, np.uint16)
    largest = np.float64(0.0)
    for j in range(len(residual)):
        count = min(terms.numel - j * SUPER_GROUP, SUPER_GROUP)
        share = np.float64(terms.workers * count)
        rms = np.float64(from_bfloat16(rows[2 * j + 1]))
        energy = rms * rms * np.float64(count)
        value = np.float32(from_bfloat16(rows[2 * j]) / np.float32(terms.workers))
        if not np.isfinite(rms) or np.isnan(value):
            value = NAN
        if np.isfinite(value):
            explained = share * (np.float64(value) * np.float64(value))
            if not terms.subtract_mean or not explained >= MEAN_SHARE * energy or value == ZERO:
                value = ZERO
        mean[j] = value
        left = energy
        if value != ZERO:
            left = energy - share * (np.float64(value) * np.float64(value))
            least = RESIDUAL_SHARE * energy
            if left < least:
                left = least
        residual[j] = left if np.isfinite(left) else 0.0
        largest = max(largest, residual[j])
    divisor = largest if largest > 0.0 else 1.0
    for j in range(len(residual)):
        relative[j] = np.float32(residual[j] / divisor)


@device
def _by_falling_energy(relative: Any, order: Any, spare: Any) -> None:
    """Indices in the order of their energies, equal ones by index; for non-negative numbers up to 1.

    They are ordered like their bits. A radix sort of three digits leaves what it needs in ``order``.
    """
    starts = np.empty(VALUES, np.int64)
    for j in range(len(order)):
        spare[j] = j
    for digit in range(3):
        starts[:] = 0
        for j in range(len(order)):
            starts[(bits_of(relative[j]) >> (DIGIT * digit)) & (VALUES - 1)] += 1
        total = 0
        for value in range(VALUES - 1, -1, -1):
            here = starts[value]
            starts[value] = total
            total += here
        for j in range(len(order)):
            value = (bits_of(relative[spare[j]]) >> (DIGIT * digit)) & (VALUES - 1)
            order[starts[value]] = spare[j]
            starts[value] += 1
        if digit < 2:
            spare[:] = order


@device
def _reaching(bound: Any, step: Any, entries: Any, terms: Any) -> Any:
    """How many of the entries, which fall, take a step whose key has bits from ``bound`` up."""
    gain = array_at(terms.gains, np.float32)[step]
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if bits_of(np.float32(entries[middle] * gain)) >= bound:
            low = middle + 1
        else:
            high = middle
    return low


@device
def _allocate(entries: Any, capacity: Any, terms: Any, reached: Any) -> None:
    """How many of the entries take each step; see `dynamiq_core.allocation.allocate`."""
    prices = array_at(terms.prices, np.int64)
    # The smallest positive bound such that everything from there up fits.
    low, high = 1, INFINITY_BITS
    while low < high:
        bound = (low + high) // 2
        spent = 0
        for t in range(terms.steps):
            spent += prices[t] * _reaching(bound, t, entries, terms)
        if spent <= capacity:
            high = bound
        else:
            low = bound + 1
    left = capacity
    for t in range(terms.steps):
        reached[t] = _reaching(low, t, entries, terms)
        left -= prices[t] * reached[t]
    if low > 1:  # the ties just below, in order, while they fit
        for t in range(terms.steps):
            ties = _reaching(low - 1, t, entries, terms) - reached[t]
            reached[t] += min(ties, left // prices[t]) if left > 0 else 0
            left -= ties * prices[t]


@device
def _widths(order: Any, relative: Any, terms: Any, width: Any) -> None:
    """The width of every super-group, chunk by chunk, which are dealt round-robin in the order of energy."""
    sizes, widths = array_at(terms.sizes, np.int64), array_at(terms.widths, np.int64)
    reached = stack(WIDTHS, np.int64)
    for chunk in range(terms.chunks):
        members = order[chunk :: terms.chunks]
        entries = relative[members]
        sent = len(members)
        while terms.drop_empty and sent > 0 and entries[sent - 1] == ZERO:
            sent -= 1
        _allocate(entries[:sent], sizes[chunk] - terms.base * sent, terms, reached)
        for k in range(len(members)):
            taken = 0
            for t in range(terms.steps):
                taken += k < reached[t]
            width[members[k]] = widths[taken] if k < sent else 0


@device
def _lay_out(order: Any, width: Any, residual: Any, terms: Any, tables: Any) -> None:
    """The rows of every chunk, by falling width and then by index."""
    total, share = len(order), array_at(terms.errors, np.float64)
    longest = -(-total // terms.chunks)
    rows, mean = array_at(tables.rows, np.int32), array_at(tables.mean, np.float32)
    scales_at, nonzero = array_at(tables.scales_at, np.int32), array_at(tables.nonzero, np.int32)
    energies, errors = array_at(tables.energies, np.float64), array_at(tables.errors, np.float64)
    chunk_of = np.empty(total, np.int32)
    first = np.zeros((terms.chunks, WIDTHS), np.int64)  # place of the next super-group of a width
    for place in range(total):
        chunk_of[order[place]] = place % terms.chunks
        first[place % terms.chunks, width[order[place]]] += 1
    begin, offset = np.empty_like(first), np.empty_like(first)
    for chunk in range(terms.chunks):
        places, planes = 0, 0
        for w in range(MAX_WIDTH, -1, -1):
            here = first[chunk, w]
            first[chunk, w] = begin[chunk, w] = places
            offset[chunk, w] = planes
            places += here
            planes += here * w * PLANE
        scales_at[chunk] = planes
        nonzero[chunk] = begin[chunk, 0]
        for k in range(places, longest):  # past the end
            at = chunk * longest + k
            rows[4 * at], rows[4 * at + 1], rows[4 * at + 2], rows[4 * at + 3] = -1, 0, planes, 0
            energies[at] = errors[at] = 0.0
    for j in range(total):
        chunk, w = chunk_of[j], width[j]
        k = first[chunk, w]
        first[chunk, w] += 1
        at = chunk * longest + k
        rows[4 * at] = j
        rows[4 * at + 1] = w
        rows[4 * at + 2] = offset[chunk, w] + (k - begin[chunk, w]) * w * PLANE
        rows[4 * at + 3] = bits_of(mean[j])
        energies[at] = residual[j]
        errors[at] = residual[j] * share[w]


@kernel
def _plan(statistics: Any, terms: Any, tables: Any) -> None:
    total = -(-terms.numel // SUPER_GROUP)
    residual, relative = np.empty(total, np.float64), np.empty(total, np.float32)
    order, width = np.empty(total, np.int32), np.empty(total, np.int32)
    _energies(statistics, terms, array_at(tables.mean, np.float32), residual, relative)
    _by_falling_energy(relative, order, width)
    _widths(order, relative, terms, width)
    _lay_out(order, width, residual, terms, tables)


class Common(NamedTuple):
    """What the plans of all tensors of one size have in common, and the arrays that ``terms`` holds addresses of."""

    plan: PlanTerms
    terms: Terms
    tables: tuple[Any, ...]  # NumPy's, so that what is kept does not look like a tensor that was left behind


@lru_cache(maxsize=256)
def _common(config: CodecConfig, numel: int, workers: int, chunks: int, gain: float) -> Common:
    plan = plan_terms(config, numel, chunks, gain)
    sizes = np.array(plan.sizes, np.int64)
    gains = np.array([step.gain for step in plan.steps], np.float32)
    prices = np.array([step.bytes for step in plan.steps], np.int64)
    widths = np.array([plan.lowest, *(step.width for step in plan.steps)], np.int64)
    errors = np.array(plan.errors, np.float64)
    terms = Terms(
        numel=numel,
        workers=workers,
        chunks=chunks,
        subtract_mean=config.subtract_mean,
        drop_empty=config.widths[0] == 0,
        sizes=sizes.ctypes.data,
        base=plan.base,
        steps=len(plan.steps),
        gains=gains.ctypes.data,
        prices=prices.ctypes.data,
        widths=widths.ctypes.data,
        errors=errors.ctypes.data,
    )
    return Common(plan, terms, (sizes, gains, prices, widths, errors))


def make_plan(
    statistics: Tensor, numel: int, *, config: CodecConfig, key: Key, workers: int, chunks: int, gain: float
) -> DynamiQPlan:
    """The plan; see `dynamiq_core.plan.make_plan`."""
    common = _common(config, numel, workers, chunks, gain)
    statistics = statistics.contiguous()
    longest = common.plan.lengths[0]
    mean = torch.empty(len(statistics), dtype=torch.float32)
    rows = torch.empty(chunks, longest, 4, dtype=torch.int32)
    scales_at, nonzero = torch.empty(2, chunks, dtype=torch.int32)
    energies, errors = torch.empty(2, chunks, longest, dtype=torch.float64)
    tables = Tables(*(table.data_ptr() for table in (mean, rows, scales_at, nonzero, energies, errors)))
    _plan(statistics.data_ptr(), common.terms, tables)
    return DynamiQPlan(
        config=config,
        key=key,
        workers=workers,
        numel=numel,
        sizes=common.plan.sizes,
        lengths=common.plan.lengths,
        mean=mean,
        rows=rows,
        scales_at=scales_at,
        nonzero=nonzero,
        energies=energies,
        errors=errors,
    )
