from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dynamiq_core.statistics import as_super_groups, counts, merge_statistics, squared_norms, statistics, super_groups

SIZES = (1, 2, 7, 255, 256, 257, 1000, 100_000)


def exact(x: Tensor) -> Tensor:
    """float64 [M, 3]: mean, root mean square and largest magnitude of every super-group."""
    rows = [part.double() for part in x.split(256)]
    return torch.stack([torch.stack((r.mean(), r.square().mean().sqrt(), r.abs().max())) for r in rows])


def assert_within_bounds(x: Tensor) -> None:
    """Half a unit of 2**-21 (mean) or 2**-10 (square) of the largest magnitude, and bfloat16's rounding."""
    got, (mean, rms, largest) = statistics(x).double(), exact(x).unbind(dim=1)
    assert ((got[:, 0] - mean).abs() <= largest * 2**-22 + mean.abs() * 2**-7.99).all()
    assert ((got[:, 1] - rms).abs() <= largest * 2**-10.99 + rms * 2**-7.99).all()


@pytest.mark.parametrize("numel", SIZES)
def test_close_to_float64(numel: int, normal) -> None:
    x = normal(numel, numel) + 0.3
    assert statistics(x).shape == (super_groups(numel), 2)
    assert statistics(x).dtype == torch.bfloat16
    assert_within_bounds(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_squared_norms(numel: int, dtype: torch.dtype, normal) -> None:
    x = normal(numel, numel).to(dtype)
    assert squared_norms(x).dtype == torch.float64
    torch.testing.assert_close(squared_norms(x), as_super_groups(x).double().square().sum(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e4, 1e30, 3e38])
def test_any_magnitude(magnitude: float, normal) -> None:
    x = normal(0, 2000).clamp(-1, 1) * magnitude
    assert_within_bounds(x)
    assert (statistics(x)[:, 1] > 0.5 * magnitude).all()


def test_roots_beside_the_middle_between_two_bfloat16() -> None:
    """Sums of squares one unit from where the root is such a middle: one bit of a float32 decides, on every machine."""
    sums = [(16 * m + 8) ** 2 + unit for m in range(128, 256) for unit in (-1, 0, 1)]
    rows = []
    for total in sums:
        row: list[int] = []
        while (left := total - sum(entry**2 for entry in row)) > 0:
            row.append(min(2047, math.isqrt(left)))
        rows.append(row + [0] * (256 - len(row)))
    roots = torch.tensor([math.sqrt(total / 256) / 1024 for total in sums], dtype=torch.float64)
    got = statistics(torch.tensor(rows, dtype=torch.float32).flatten() / 1024)[:, 1]
    assert torch.equal(got, roots.to(torch.float32).to(torch.bfloat16))


def test_heavy_tails_and_constants(normal) -> None:
    x = normal(0, 4096)
    x[:2048] = x[:2048] ** 5
    x[2048:2560] = 0.1
    x[2560:2816] = -7e8
    x[3000] = 1e6
    assert_within_bounds(x)


def test_small_values_beside_a_large_one() -> None:
    """All the small ones are rounded alike, so their errors do not average out."""
    rows = (0.25 + torch.arange(64) / 4096)[:, None].repeat(1, 256)
    rows[:, 100] = 1.99
    assert_within_bounds(rows.flatten())


def test_zeros_are_zero() -> None:
    assert (statistics(torch.zeros(1000)) == 0).all()


def test_what_is_near_the_smallest_float_underflows_to_less_and_not_to_nan(normal) -> None:
    x = normal(0, 512) * 1e-38
    got = statistics(x).double()
    assert torch.isfinite(got).all()
    assert (got[:, 1] - exact(x)[:, 1]).abs().max() <= 2**-115  # a unit of squares at the smallest exponent


@pytest.mark.parametrize("numel", [1, 7, 255, 257, 300])
def test_the_padding_counts_for_nothing(numel: int) -> None:
    """A constant has itself as mean and root mean square, however few coordinates its super-group has."""
    assert torch.equal(
        statistics(torch.full((numel,), -1.5)), torch.tensor([[-1.5, 1.5]] * super_groups(numel)).bfloat16()
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_mark_their_own_super_group_alone(bad: float, normal) -> None:
    x = normal(0, 1000)
    clean = statistics(x)
    x[300] = bad
    got = statistics(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_the_order_of_summation_does_not_matter(normal) -> None:
    """Any order of the coordinates of a super-group gives the same bits, even where the sum cancels."""
    rows = normal(0, 500, 256)
    rows = rows * torch.exp2(8 * normal(1, 500, 256))
    rows = rows - rows.mean(dim=1, keepdim=True)
    order = normal(2, 500, 256).argsort(dim=1)
    assert torch.equal(statistics(rows.flatten()), statistics(rows.gather(1, order).flatten()))
    # Partial sums of more than 24 bits that cancel to the last one: in float32 some would not.
    half = 0.5 + 0.5 * torch.rand(500, 128, generator=torch.Generator().manual_seed(3))
    cancelling = torch.cat((half, -half.flip(1)), dim=1).gather(1, order)
    assert (statistics(cancelling.flatten())[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(dtype: torch.dtype, normal) -> None:
    x = normal(0, 1000).to(dtype)
    assert torch.equal(statistics(x), statistics(x.float()))


def test_counts_and_padding() -> None:
    assert counts(600, torch.device("cpu")).tolist() == [256, 256, 88]
    assert counts(512, torch.device("cpu")).tolist() == [256, 256]
    rows = as_super_groups(torch.ones(257))
    assert rows.shape == (2, 256)
    assert rows.sum() == 257


def test_merging_adds_means_and_squares(normal) -> None:
    parts = [statistics(normal(i, 5000) * 10**i + i) for i in range(4)]
    every = torch.stack(parts).double()
    expected = torch.stack((every[..., 0].sum(dim=0), every[..., 1].square().sum(dim=0).sqrt()), dim=1)
    got = merge_statistics(parts)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=2**-7.99, atol=0)


def test_merging_does_not_care_for_the_order_of_the_workers(normal) -> None:
    """Whoever owns a sum may add up in the order of arrival."""
    parts = [statistics(normal(i, 50_000) + 0.2 * normal(9, 50_000)) for i in range(5)]
    expected = merge_statistics(parts)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert torch.equal(merge_statistics([parts[i] for i in order]), expected)


def test_merging_one_worker_changes_nothing_and_nan_stays(normal) -> None:
    part = statistics(normal(0, 1000))
    assert torch.equal(merge_statistics([part]), part)
    bad = part.clone()
    bad[2] = math.nan
    merged = merge_statistics([part, bad, part])
    assert merged[2].isnan().all()
    assert torch.isfinite(merged[[0, 1, 3]].float()).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_merging_squares_neither_underflows_nor_overflows(magnitude: float) -> None:
    part = torch.tensor([[0.0, magnitude]]).bfloat16()
    assert merge_statistics([part] * 4)[0, 1].item() == 2 * part[0, 1].item()
