from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynamiq_core.levels import COLUMNS, distances, level_table, levels, positions

WIDTHS = range(1, 9)
BENDS = (1.0, 1.25, 1.5, 2.7, 4.0)
ONE = torch.ones(1, 1)


def by_formula(width: int, bend: float) -> Tensor:
    """The levels once more, in float64: half the gaps have length 1, the outer ones length ``bend``, ends at one."""
    inner = max(2 ** (width - 2), 0.5)  # gaps from zero to the bend; the one across zero counts by its half
    gaps = [1.0 if (k + 0.5) < inner else bend for k in range(2 ** (width - 1))]
    gaps[0] /= 2
    upper = torch.tensor(gaps, dtype=torch.float64).cumsum(0)
    upper = upper / upper[-1]
    return torch.cat((-upper.flip(0), upper))


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_levels_are_two_arithmetic_progressions(width: int, bend: float) -> None:
    got = levels(width, bend)
    assert len(got) == 2**width
    assert got.dtype == torch.float32
    # The bend is used with twelve fractional bits.
    torch.testing.assert_close(got.double(), by_formula(width, bend), rtol=0, atol=2e-4)
    torch.testing.assert_close(got.double(), by_formula(width, round(bend * 4096) / 4096), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_odd_symmetric_increasing_without_a_zero_and_ending_at_one(width: int, bend: float) -> None:
    got = levels(width, bend)
    assert torch.equal(got, -got.flip(0))
    assert (got.diff() > 0).all()
    assert (got != 0).all()
    assert (got[0], got[-1]) == (-1, 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_bend_one_is_uniform(width: int) -> None:
    torch.testing.assert_close(levels(width, 1.0), torch.linspace(-1, 1, 2**width), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_positions_invert_levels_and_are_straight_between_them(width: int, bend: float) -> None:
    """A value that lies a fraction f of the way between two levels has a position that does so too, in every cell."""
    row, codes = level_table(bend)[width : width + 1], torch.arange(2**width, dtype=torch.float32)
    centre, level = row[0, 0], levels(width, bend)
    torch.testing.assert_close(positions(level[None], ONE, row)[0] + centre, codes, rtol=0, atol=4e-5)
    for fraction in (0.25, 0.5, 0.875):
        between = level[:-1] + fraction * level.diff()
        torch.testing.assert_close(
            positions(between[None], ONE, row)[0] + centre, codes[:-1] + fraction, rtol=0, atol=4e-5
        )


@pytest.mark.parametrize("bend", BENDS)
def test_one_lands_exactly_on_the_last_code(bend: float) -> None:
    table = level_table(bend)[1:]
    ends = torch.tensor([[-1.0, 1.0]]).expand(8, 2)
    assert torch.equal(positions(ends, ONE, table), ends * table[:, :1])


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_positions_never_fall(width: int, bend: float) -> None:
    y = torch.linspace(-1, 1, 20_001)[None]
    p = positions(y, ONE, level_table(bend)[width : width + 1])
    assert (p.diff() >= 0).all()


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_products_that_backends_may_fuse_are_exact(width: int, bend: float) -> None:
    """Float32 and float64 agree on code * bend - offset and on the product of any threshold with the dither."""
    row = level_table(bend)[width : width + 1]
    codes = torch.arange(2**width)[None]
    assert torch.equal(distances(codes, row).double(), distances(codes, row.double()))
    u = torch.arange(1, 2**16, 2, dtype=torch.float32) / 2**16
    dither = row[0, COLUMNS.index("dither")]
    assert torch.equal(((u - 0.5) * dither).double(), (u.double() - 0.5) * dither.double())


class Entries:
    """Entries of groups of 16 normal numbers over a scale rounded up in quarter octaves, as a weighted histogram."""

    def __init__(self) -> None:
        generator, bins = torch.Generator().manual_seed(0), 2048
        x = torch.randn(20_000, 16, generator=generator, dtype=torch.float64)
        scale = x.abs().amax(dim=1, keepdim=True)
        scale = scale * 2 ** (torch.rand(len(x), 1, generator=generator, dtype=torch.float64) / 4)
        bin_of = ((x / scale).abs() * bins).long().clamp(max=bins - 1)
        weight = torch.bincount(bin_of.flatten(), scale.square().expand_as(x).flatten(), minlength=bins)
        self.weight = weight / x.square().sum()
        self.value = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins

    def error(self, upper: Tensor, dither: Tensor | float = 0.0) -> Tensor:
        """Error over energy of stochastic rounding to +-``upper`` and subtracting a dither of that length.

        A fraction f of the way between levels at distance g, it is g (g - dither) f (1 - f) + dither**2 / 12.
        """
        bounds = torch.cat((-upper[:1], upper))
        cell = torch.searchsorted(upper.detach(), self.value).clamp(max=len(upper) - 1)
        low, high = bounds[cell], bounds[cell + 1]
        spread = (self.value - low) * (high - self.value)
        return (self.weight * (spread * (1 - dither / (high - low)) + dither**2 / 12)).sum()

    def optimal(self, start: Tensor, dither: float) -> float:
        """Least error over all odd-symmetric tables with ends at one, and over the dither unless it is zero."""
        log_gaps = torch.cat((2 * start[:1], start.diff())).log().requires_grad_()
        log_dither = torch.tensor(dither, dtype=torch.float64).log().requires_grad_(dither > 0)
        parameters = [log_gaps, log_dither] if dither > 0 else [log_gaps]
        search = torch.optim.LBFGS(parameters, max_iter=80, line_search_fn="strong_wolfe", tolerance_change=1e-8)

        def error() -> Tensor:
            gaps = log_gaps.exp()
            upper = torch.cat((gaps[:1] / 2, gaps[1:])).cumsum(0)
            return self.error(upper / upper[-1], log_dither.exp())

        def closure() -> Tensor:
            search.zero_grad()
            loss = error().log()
            loss.backward()
            return loss.detach()

        search.step(closure)
        return error().item()


@pytest.fixture(scope="module")
def entries() -> Entries:
    return Entries()


@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_near_the_best_table_for_normal_entries_and_better_than_uniform(width: int, entries: Entries) -> None:
    """Measured: within 3.9 % of the optimum and 8.3 to 11 % better than uniform.

    With the dither subtracted: within 5.3 % of the best levels and dither, and 3.3 to 4.7 % better than uniform.
    """
    tables = {bend: levels(width, bend)[2 ** (width - 1) :].double() for bend in (1.0, 1.5)}
    bent, uniform = tables[1.5], tables[1.0]
    plain = entries.error(bent).item()
    assert plain < 1.045 * entries.optimal(bent, 0.0)
    assert entries.error(uniform).item() > 1.075 * plain

    def dither(bend: float) -> float:
        row = level_table(bend)[width].double()
        return float(row[COLUMNS.index("dither")] * row[COLUMNS.index("gap")])

    dithered = entries.error(bent, dither(1.5)).item()
    assert dithered < 1.06 * entries.optimal(bent, dither(1.5))
    assert entries.error(uniform, dither(1.0)).item() > 1.025 * dithered
