"""Homomorphic codes: they add up without error, and what they lose is what the grid says."""

from __future__ import annotations

import math

import pytest
import torch

from dynamiq_core import ConfigError, InputError, Received, vnmse
from dynamiq_core.baselines import THC
from dynamiq_core.baselines.blocks import unpack
from dynamiq_core.baselines.thc import BLOCK, hadamard

WIDE = 5.0  # standard deviations beyond which next to nothing lies


def test_transform_is_that_of_sylvesters_matrix_and_its_own_inverse(normal):
    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x = normal(0, 3, 64)
    torch.testing.assert_close(hadamard(x), x @ matrix / 8, rtol=1e-5, atol=1e-6)
    long = normal(1, 5, BLOCK)
    torch.testing.assert_close(hadamard(hadamard(long)), long, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(long).norm(dim=1), long.norm(dim=1))


def test_codes_add_up_without_recompression(normal, ring, direct):
    """A ring and a direct exchange add the same integers, so their results have the same bits."""
    rows = [*normal(2, 5, 5000)]
    codec = THC(9)
    one, other = ring(rows, codec), direct(rows, codec)
    assert torch.equal(one.mean, other.mean)
    total = sum(unpack(codec.compress(row, one.plan, chunk=1, slot=rank), 9) for rank, row in enumerate(rows))
    message = one_message(codec, rows, one.plan)
    assert torch.equal(unpack(message, 9), total)
    decoded = codec.decompress(message, one.plan, chunk=1, slot=4, out=torch.zeros(5000))
    part = slice(one.plan.layout.bounds[1] * BLOCK, one.plan.layout.bounds[2] * BLOCK)
    assert torch.equal(decoded[part], one.mean[part])


def one_message(codec, rows, plan):
    message = codec.compress(rows[0], plan, chunk=1, slot=0)
    for rank in range(1, len(rows)):
        message = codec.decompress_accumulate_recompress(
            [Received(message, rank - 1)], rows[rank], plan, chunk=1, slot=rank
        )
    return message


@pytest.mark.parametrize(("bits", "workers"), [(8, 8), (8, 255), (4, 15), (4, 4), (2, 3), (12, 7)])
def test_sums_of_the_largest_codes_fit(bits, workers, plan_of, normal):
    """Most entries lie beyond the range, on every rank at the same end: n times the steps is the largest sum."""
    x = normal(8, BLOCK)
    codec = THC(bits, reach=0.5)
    plan = plan_of([x] * workers, codec, chunks=1)
    message = codec.compress(x, plan, chunk=0, slot=0)
    for rank in range(1, workers):
        message = codec.decompress_accumulate_recompress([Received(message, rank - 1)], x, plan, chunk=0, slot=rank)
    total = unpack(message, bits)
    assert plan.steps == (2**bits - 1) // workers
    assert (total.min(), total.max()) == (0, workers * plan.steps)
    assert 8 * len(message) == BLOCK * bits


@pytest.mark.parametrize(("bits", "workers"), [(8, 2), (8, 8), (6, 3)])
def test_error_is_that_of_stochastic_rounding_to_the_grid(bits, workers, normal, ring):
    """For normal entries a fraction f of a step is uniform, and its variance f (1 - f) is 1/6 of a squared step."""
    rows = [*normal(3, workers, 64 * BLOCK)]
    codec = THC(bits, reach=WIDE)
    result = ring(rows, codec)
    step = 2 * result.plan.reach.mean().item() / result.plan.steps
    exact = torch.stack(rows).double().mean(dim=0)
    expected = step**2 / 6 / workers * exact.numel() / exact.square().sum().item()
    assert vnmse(result.mean, exact) == pytest.approx(expected, rel=0.05)


def biases(codec: THC, x: torch.Tensor, ring, repeats: int = 1000) -> torch.Tensor:
    """How many standard errors the mean result is from the truth, root mean square over the coordinates.

    Blocks have signs and draws of their own, so a gradient that repeats a block repeats the experiment.
    """
    row = x.repeat(repeats)
    results = ring([row, row], codec).mean.double().view(repeats, BLOCK)
    return ((results.mean(dim=0) - x) / (results.std(dim=0) / math.sqrt(repeats))).square().mean().sqrt()


def test_unbiased_within_the_range_and_not_beyond(normal, ring):
    x = normal(5, BLOCK)
    assert biases(THC(3, reach=WIDE), x, ring) < 1.15  # 1, give or take 1 / sqrt(2 * 1024)
    assert biases(THC(3, reach=1.0), x, ring) > 5  # a fifth of the energy is cut off


def test_range_is_that_of_the_rank_with_the_largest_norm(normal, plan_of):
    small, large = normal(6, 2, 3000)
    plan = plan_of([small, 10 * large, small], THC())
    alone = plan_of([10 * large], THC())
    assert torch.equal(plan.reach, alone.reach)
    norms = (10 * large[:BLOCK]).square().mean().sqrt().item()
    assert plan.reach[0].item() == pytest.approx(2.154 * norms, rel=2**-8)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_takes_its_block_and_no_other(bad, normal, ring):
    rows = [*normal(7, 3, 3 * BLOCK + 5)]
    clean = ring(rows, THC()).mean
    rows[2][BLOCK + 3] = bad
    mean = ring(rows, THC()).mean
    assert mean[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(mean[:BLOCK], clean[:BLOCK])
    assert torch.equal(mean[2 * BLOCK :], clean[2 * BLOCK :])


def test_more_workers_than_the_bits_can_count_are_refused(plan_of):
    assert plan_of([torch.ones(5)] * 3, THC(2)).steps == 1
    with pytest.raises(InputError, match="sums of 2 bits hold up to 3 workers, not 4"):
        plan_of([torch.ones(5)] * 4, THC(2))


@pytest.mark.parametrize("bad", [{"bits": 1}, {"bits": 17}, {"bits": 8.0}, {"reach": 0.1}, {"seed": -1}])
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=str(next(iter(bad)))):
        THC(**bad)


def test_what_is_too_small_for_a_range_becomes_zero_and_nothing_larger_does(normal, ring):
    rows = normal(9, 2, BLOCK)
    assert not ring([*(rows * 1e-32)], THC()).mean.any()
    exact = (rows.double() * 1e-29).mean(dim=0)
    assert vnmse(ring([*(rows * 1e-29)], THC()).mean, exact) < 0.02
