from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from dynamiq_core.fused import multiply_add
from dynamiq_core.scales import INVERSE_RATIOS


def exactly(a: float, b: float, c: float) -> float:
    """The float32 nearest to ``a * b + c``, ties to even, by rational arithmetic."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = torch.tensor(float(exact), dtype=torch.float64).to(torch.float32)
    around = torch.stack((near.nextafter(torch.tensor(-math.inf)), near, near.nextafter(torch.tensor(math.inf))))
    best = min(around.tolist(), key=lambda f: (abs(Fraction(f) - exact), torch.tensor(f).view(torch.int32).item() & 1))
    return float(best)


def random_floats(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents)


def test_one_rounding_for_any_exponents() -> None:
    a, b, c = (random_floats(3000, seed) for seed in range(3))
    c[::2] = -(a * b)[::2] * (1 + 2.0**-20 * c[::2].sign())  # most of the product cancels
    expected = [exactly(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert multiply_add(a, b, c).tolist() == expected
    assert multiply_add(a, b, c).tolist() != (a * b + c).tolist()


def test_where_float64_would_round_twice() -> None:
    """The product ends just above the middle between two floats, by less than float64 holds beside the addend."""
    a, b = torch.tensor(1 + 2.0**-23), torch.tensor(2.0**-24)
    for tiny, signs in ((2.0**-60, 1), (-(2.0**-60), 1), (2.0**-60, -1), (-(2.0**-60), -1)):
        addend = torch.tensor(signs * (1 + 2.0**-23))
        low = torch.tensor(signs * tiny)
        # 1 + 2**-23 plus half a unit is a tie, which the tiny product decides.
        product = (torch.tensor(signs * (2.0**-24 + 2.0**-47)), torch.tensor(1.0))
        assert multiply_add(*product, addend) == exactly(product[0].item(), 1.0, addend.item())
        assert multiply_add(low, torch.tensor(1.0), addend) == addend
    assert multiply_add(a, b, torch.tensor(1.0)) == exactly(a.item(), b.item(), 1.0)


def test_infinities_nan_and_overflow() -> None:
    inf, nan, one = (torch.tensor(x) for x in (math.inf, math.nan, 1.0))
    assert multiply_add(inf, one, one) == math.inf
    assert multiply_add(one, one, -inf) == -math.inf
    assert multiply_add(inf, one, -inf).isnan()
    assert multiply_add(inf, torch.tensor(0.0), one).isnan()
    assert multiply_add(one, one, nan).isnan()
    assert multiply_add(torch.tensor(3e38), torch.tensor(2.0), one) == math.inf


def test_operands_broadcast() -> None:
    a, b, c = random_floats(6, 0).view(2, 3), random_floats(3, 1), random_floats(2, 2)[:, None]
    rows = multiply_add(a, b, c)
    assert rows.shape == (2, 3)
    assert rows[1, 2] == exactly(a[1, 2].item(), b[2].item(), c[1, 0].item())


def test_a_step_of_newtons_gives_the_nearest_reciprocal_of_a_bfloat16() -> None:
    """A quotient that is off by up to four units becomes the one that is rounded to nearest, for every mantissa."""
    scale = torch.arange(128, 256).float() / 128
    nearest = 1.0 / scale
    for units in range(-4, 5):
        quotient = (nearest.view(torch.int32) + units).view(torch.float32)
        one = torch.ones(1)
        assert torch.equal(multiply_add(quotient, multiply_add(-scale, quotient, one), quotient), nearest), units
    assert len(INVERSE_RATIOS) == 16
