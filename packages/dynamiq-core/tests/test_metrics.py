from __future__ import annotations

import math

import pytest
import torch

from dynamiq_core import InputError, vnmse


def test_squared_error_over_energy() -> None:
    assert vnmse(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 8 / 25
    assert vnmse(torch.tensor([[3.0], [4.0]]), torch.tensor([[3.0], [4.0]])) == 0.0


def test_zero_energy() -> None:
    zero = torch.zeros(3)
    assert vnmse(zero, zero) == 0.0
    assert vnmse(torch.ones(3), zero) == math.inf


def test_float64_inside() -> None:
    """Neither do squares leave float32's range, nor is a small error lost beside a large value."""
    exact = torch.full((1000,), 1e30)
    assert vnmse(exact * 0.5, exact) == pytest.approx(0.25)
    assert vnmse(exact * 1e-35, exact * 1e-40) == pytest.approx(1e10, rel=1e-3)
    one = torch.ones(1, dtype=torch.float64)
    assert vnmse(one + 1e-9, one) == pytest.approx(1e-18, rel=1e-6)


def test_half_precision_and_mixed_dtypes() -> None:
    assert vnmse(torch.tensor([60000.0], dtype=torch.float16), torch.tensor([30000.0])) == 1.0
    assert vnmse(torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.float64)) == 1.0


def test_nan_is_not_hidden() -> None:
    assert math.isnan(vnmse(torch.tensor([math.nan, 1.0]), torch.ones(2)))


def test_graphs_are_not_extended() -> None:
    x = torch.ones(2, requires_grad=True)
    assert vnmse(2 * x, x) == 1.0
    assert x.grad is None


def test_shapes_that_differ() -> None:
    with pytest.raises(InputError, match=r"\(2,\) and \(2, 1\)"):
        vnmse(torch.ones(2), torch.ones(2, 1))
