from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.allocation import ERRORS, LARGEST_ERROR, Step, allocate, chained_errors, cost, hull, normalised_errors

STEADY = settings(derandomize=True, deadline=None, max_examples=60)


def greedy(energies: list[float], capacity: int, steps: tuple[Step, ...], lowest: int) -> list[int]:
    """One chunk, step by step by falling gain per byte, ties by step and then by position, until one is too dear."""
    gains = torch.tensor([s.gain for s in steps], dtype=torch.float32)
    keys = torch.tensor(energies, dtype=torch.float32) * gains[:, None]
    order = sorted((-key, t, k) for t, row in enumerate(keys.tolist()) for k, key in enumerate(row) if key > 0)
    widths = [lowest] * len(energies)
    for _, t, k in order:
        capacity -= steps[t].bytes
        if capacity < 0:
            break
        widths[k] = steps[t].width
    return widths


def error_of(energies: list[float], widths: tuple[int, ...] | list[int], config: CodecConfig, gain: float) -> float:
    errors = chained_errors(config, gain)
    return sum(e * errors[w] for e, w in zip(energies, widths, strict=True))


energies_of_a_chunk = st.lists(
    st.one_of(
        st.floats(0, 1, width=32),
        st.sampled_from([0.0, 1.0, 0.5, 0.25, 1e-3]),
        st.floats(-45, 0).map(lambda e: 10.0**e),
    ),
    min_size=1,
    max_size=12,
).map(lambda values: sorted(values, reverse=True))

sets_of_widths = st.sets(st.integers(0, 8), min_size=1).filter(lambda w: max(w) > 0).map(lambda w: tuple(sorted(w)))


@STEADY
@given(
    chunks=st.lists(energies_of_a_chunk, min_size=1, max_size=4),
    widths=sets_of_widths,
    scales=st.sampled_from(["log", "linear"]),
    gain=st.floats(1, 8),
    fill=st.floats(0, 1.2),
)
def test_equals_a_greedy_written_as_a_loop(
    chunks: list[list[float]], widths: tuple[int, ...], scales: Any, gain: float, fill: float
) -> None:
    config = CodecConfig(widths=widths, scales=scales, bits=max(widths) + 1)
    lowest, steps = hull(config, gain)
    longest = max(map(len, chunks))
    padded = torch.tensor([c + [0.0] * (longest - len(c)) for c in chunks], dtype=torch.float32)
    capacities = [int(fill * len(c) * sum(s.bytes for s in steps)) for c in chunks]
    got = allocate(padded, torch.tensor(capacities), steps, lowest)
    assert got.dtype == torch.int32
    for row, capacity, chunk_widths in zip(padded.tolist(), capacities, got.tolist(), strict=True):
        assert chunk_widths == greedy(row, capacity, steps, lowest)
        assert sum(cost(w, config) - cost(lowest, config) for w in chunk_widths) <= capacity
        assert chunk_widths == sorted(chunk_widths, reverse=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("widths", [(0, 2, 3, 4, 5, 6, 7, 8), (0, 2, 4, 8), (2, 4, 8)])
def test_within_one_step_of_the_optimum(seed: int, widths: tuple[int, ...]) -> None:
    """Against every combination of widths: what is missed is at most the step that no longer fitted."""
    config, gain = CodecConfig(widths=widths), 2.5
    generator = torch.Generator().manual_seed(seed)
    energies = torch.exp2(-12 * torch.rand(4, generator=generator)).sort(descending=True).values
    lowest, steps = hull(config, gain)
    capacity = int(torch.randint(0, 4 * sum(s.bytes for s in steps), (1,), generator=generator))
    got = allocate(energies[None], torch.tensor([capacity]), steps, lowest)[0].tolist()

    budget = capacity + 4 * cost(lowest, config)
    best = min(
        error_of(energies.tolist(), choice, config, gain)
        for choice in itertools.combinations_with_replacement(widths[::-1], 4)  # falling, as in any optimum
        if sum(cost(w, config) for w in choice) <= budget
    )
    reached = error_of(energies.tolist(), got, config, gain)
    refused = [e * s.gain * s.bytes for e, w in zip(energies.tolist(), got, strict=True) for s in steps if s.width > w]
    assert best <= reached * (1 + 1e-6)
    assert reached <= best + max(refused, default=0.0) + 1e-9


def test_ties_go_to_the_first_positions() -> None:
    lowest, steps = hull(CodecConfig(), 1.0)
    energies = torch.full((1, 6), 0.25)
    for affordable in range(7):
        got = allocate(energies, torch.tensor([affordable * steps[0].bytes]), steps, lowest)
        assert got[0].tolist() == [steps[0].width] * affordable + [lowest] * (6 - affordable)


def test_energies_of_nothing_get_nothing() -> None:
    lowest, steps = hull(CodecConfig(), 1.0)
    got = allocate(torch.zeros(2, 5), torch.tensor([10_000, 10_000]), steps, lowest)
    assert (got == lowest).all()
    smallest = torch.tensor([[1.0, 1e-45, 0.0]])  # the least float32 above zero still counts
    assert allocate(smallest, torch.tensor([10_000]), steps, lowest)[0].tolist() == [8, smallest_reached(steps), 0]


def smallest_reached(steps: tuple[Step, ...]) -> int:
    keys = torch.tensor(1e-45) * torch.tensor([s.gain for s in steps], dtype=torch.float32)
    taken = int((keys > 0).sum())
    return steps[taken - 1].width if taken else 0


def test_a_single_width_leaves_nothing_to_choose() -> None:
    lowest, steps = hull(CodecConfig(widths=(4,)), 2.5)
    assert (lowest, steps) == (4, ())
    assert (allocate(torch.rand(2, 3), torch.tensor([0, 99]), steps, lowest) == 4).all()


def test_cost_counts_planes_and_scales() -> None:
    assert [cost(w, CodecConfig()) for w in (0, 1, 2, 8)] == [0, 32 + 10, 64 + 10, 256 + 10]
    assert [cost(w, CodecConfig.paper()) for w in (0, 1, 2, 8)] == [0, 32 + 18, 64 + 18, 256 + 18]


@STEADY
@given(widths=sets_of_widths, scales=st.sampled_from(["log", "linear"]), gain=st.floats(0.5, 40))
def test_the_hull_lies_below_every_width_and_is_convex(widths: tuple[int, ...], scales: Any, gain: float) -> None:
    config = CodecConfig(widths=widths, scales=scales, bits=max(widths) + 1)
    lowest, steps = hull(config, gain)
    gains = [s.gain for s in steps]
    assert gains == sorted(gains, reverse=True)
    assert all(g > 0 for g in gains)
    assert lowest == widths[0]
    errors = chained_errors(config, gain)
    corners = [(cost(lowest, config), errors[lowest])]
    for step in steps:
        assert cost(step.width, config) == corners[-1][0] + step.bytes
        corners.append((cost(step.width, config), errors[step.width]))
    for width in widths:
        at = cost(width, config)
        below = [
            a[1] + (b[1] - a[1]) * (at - a[0]) / (b[0] - a[0])
            for a, b in itertools.pairwise(corners)
            if a[0] <= at <= b[0]
        ]
        assert errors[width] >= min(below, default=corners[-1][1]) - 1e-9


def test_many_hops_make_few_bits_worthless() -> None:
    """Where the error of a width would exceed the energy itself, sending nothing is better."""
    one_hop = [s.width for s in hull(CodecConfig(), 1.0)[1]]
    many = [s.width for s in hull(CodecConfig(), 32.5)[1]]
    assert one_hop == [2, 3, 4, 5, 6, 7, 8]
    assert many[0] > 2
    assert many[-1] == 8


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("scales", ["log", "linear"])
def test_errors_on_a_ring_grow_with_every_encoding_that_a_gradient_passes(n: int, scales: Any) -> None:
    """The closed form against the sum over the gradients, which pass 1, 2, ..., n encodings."""
    config = CodecConfig(scales=scales)
    grown = [sum((1 + c) ** hops - 1 for hops in range(1, n + 1)) / n for c in normalised_errors(config)[1:]]
    expected = [min(error, LARGEST_ERROR) for error in grown]
    assert chained_errors(config, (n + 1) / 2) == (1.0, *(pytest.approx(error, rel=1e-9) for error in expected))


def test_errors_without_subtracted_dither_add_up() -> None:
    config = CodecConfig(rounding="independent")
    assert chained_errors(config, 32.5) == (1.0, *(32.5 * c for c in normalised_errors(config)[1:]))


def test_any_number_of_hops_leaves_numbers_to_reckon_with() -> None:
    """Thousands of ranks and one bit: what is worthless stays finite, and the widths above it can be had."""
    assert max(chained_errors(CodecConfig(), 5000.0)) == LARGEST_ERROR
    lowest, steps = hull(CodecConfig(), 5000.0, floor=2)
    assert lowest == 2
    assert all(0 < s.gain < math.inf for s in steps)
    assert steps[-1].width == 8


@pytest.mark.parametrize("rounding", ["dithered", "independent"])
@pytest.mark.parametrize("scales", ["log", "linear"])
@pytest.mark.parametrize("width", range(1, 9))
def test_the_table_of_errors_derived_again(width: int, scales: Any, rounding: Any, plan_of, normal) -> None:
    """Normal entries, super-groups of different magnitude, one encoding: error over energy within 2 %."""
    rows = 400
    octave = torch.rand(rows, 1, generator=torch.Generator().manual_seed(width))
    x = (normal(width, rows, 256) * torch.exp2(octave)).flatten()
    config = CodecConfig(widths=(width,), bits=width + 1, scales=scales, rounding=rounding, subtract_mean=False)
    codec = DynamiQ(config)
    plan = plan_of([x], codec)
    message = codec.compress(x, plan, chunk=0, slot=0)
    y = codec.decompress(message, plan, chunk=0, slot=0, out=torch.empty_like(x))
    ratio = per_row(y - x) / per_row(x)
    assert normalised_errors(config)[width] == pytest.approx(ratio.mean().item(), rel=0.02)


def per_row(x: Tensor) -> Tensor:
    return x.double().view(-1, 256).square().sum(dim=1)


def test_correlated_rounding_has_the_errors_of_plain_rounding() -> None:
    for scales in ("log", "linear"):
        correlated, independent = (
            normalised_errors(CodecConfig(scales=scales, rounding=kind)) for kind in ("correlated", "independent")
        )
        assert correlated == independent
        assert correlated[0] == 1.0
        assert math.isclose(correlated[1], ERRORS[scales, False][0])
