"""Six-sigma tests of the bias, over more than ten thousand independent draws, with quantisers that fail them.

Every super-group has draws of its own. So one tensor that repeats the same 32 values often enough is as good as ten
thousand seeds; the step is varied as well. Half of the values lie in a group of lower scale than the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, reference

VALUES = 32
REPEATS = 5376  # of the values in one tensor: 672 super-groups
STEPS = 2
DRAWS = REPEATS * STEPS


def gradients_of(workers: int, normal: Any) -> list[Tensor]:
    """float32 [32] per worker, the second group 0.37 times as large as the first."""
    values = normal(3, workers, VALUES)
    values[:, 16:] *= 0.37
    return list(values)


def deviations(estimates: Tensor, exact: Tensor) -> Tensor:
    """Mean error of each value in standard deviations of that mean: normal variables if there is no bias."""
    assert len(estimates) == DRAWS > 10_000
    error = estimates.double() - exact
    return error.mean(dim=0) / (error.std(dim=0) / DRAWS**0.5)


def estimates(codec: DynamiQ, values: list[Tensor], reduce: Callable[..., Any]) -> Tensor:
    """[draws, 32]: what an all-reduce makes of the values, over and over."""
    tiled = [v.repeat(REPEATS) for v in values]
    return torch.cat([reduce(tiled, codec, chunks=1, step=step).mean.view(-1, VALUES) for step in range(STEPS)])


def codec_of(width: int, **changes: Any) -> DynamiQ:
    return DynamiQ(CodecConfig(widths=(width,), bits=width + 1, subtract_mean=False, **changes))


def assert_unbiased(z: Tensor) -> None:
    assert z.abs().max() < 6, z
    # Sixty-four values together: a chi-square variable, within six of its standard deviations.
    assert z.square().sum() < VALUES + 6 * (2 * VALUES) ** 0.5, z


def is_biased(z: Tensor) -> bool:
    return bool(z.abs().max() > 6)


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("rounding", ["dithered", "correlated", "independent"])
def test_one_encoding(width: int, rounding: Any, ring, normal) -> None:
    values = gradients_of(1, normal)
    z = deviations(estimates(codec_of(width, rounding=rounding), values, ring), values[0].double())
    assert_unbiased(z)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("rounding", ["dithered", "correlated"])
def test_one_encoding_with_linear_scales(width: int, rounding: Any, ring, normal) -> None:
    values = gradients_of(1, normal)
    codec = codec_of(width, rounding=rounding, scales="linear")
    assert_unbiased(deviations(estimates(codec, values, ring), values[0].double()))


def test_other_bends(ring, normal) -> None:
    values = gradients_of(1, normal)
    for bend in (1.0, 4.0):
        assert_unbiased(deviations(estimates(codec_of(3, bend=bend), values, ring), values[0].double()))


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("rounding", ["dithered", "independent"])
def test_a_chain_of_four_hops(width: int, rounding: Any, ring, normal) -> None:
    """Every hop requantises the partial sum; given what happened before, its error has mean zero."""
    values = gradients_of(4, normal)
    z = deviations(estimates(codec_of(width, rounding=rounding), values, ring), torch.stack(values).double().mean(0))
    assert_unbiased(z)


def test_a_chain_with_linear_scales(ring, normal) -> None:
    values = gradients_of(4, normal)
    codec = codec_of(4, rounding="independent", scales="linear")
    assert_unbiased(deviations(estimates(codec, values, ring), torch.stack(values).double().mean(0)))


def test_three_messages_into_one(direct, normal) -> None:
    values = gradients_of(4, normal)
    z = deviations(estimates(codec_of(3), values, direct), torch.stack(values).double().mean(0))
    assert_unbiased(z)


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("threshold", [0.5, 0.25], ids=["to nearest", "rather down than up"])
def test_a_fixed_threshold_is_caught(
    width: int, threshold: float, ring, normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control. A little of the threshold still varies, so that there is a deviation to divide by."""
    values = gradients_of(1, normal)
    honest = reference.thresholds

    def nearly_fixed(*args: Any, **kwargs: Any) -> Tensor:
        return threshold + 0.25 * (honest(*args, **kwargs) - 0.5)

    monkeypatch.setattr(reference, "thresholds", nearly_fixed)
    z = deviations(estimates(codec_of(width, rounding="independent"), values, ring), values[0].double())
    assert is_biased(z[z.isfinite()])


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_threshold_too_low_by_a_tenth_is_caught_along_a_chain(
    width: int, ring, normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control at the size that matters: a tenth of a gap, far less than one standard deviation."""
    values = gradients_of(4, normal)
    honest = reference.thresholds
    monkeypatch.setattr(reference, "thresholds", lambda *args, **kwargs: 0.9 * honest(*args, **kwargs))
    z = deviations(
        estimates(codec_of(width, rounding="independent"), values, ring), torch.stack(values).double().mean(0)
    )
    assert is_biased(z)


@pytest.mark.parametrize("width", [2, 5])
def test_correlated_rounding_is_biased_along_a_chain(width: int, ring, normal) -> None:
    """What the choice of the default rests on: a partial sum knows the earlier thresholds, and so does the next one.

    Measured on this chain of four, in standard deviations of the result: the bias of a value has a root mean square of
    0.25 over the values, at two bits as at five, and reaches 0.7 to 0.9.
    """
    values = gradients_of(4, normal)
    z = deviations(
        estimates(codec_of(width, rounding="correlated"), values, ring), torch.stack(values).double().mean(0)
    )
    bias = z / DRAWS**0.5
    assert is_biased(z)
    assert 0.1 < bias.square().mean().sqrt() < 0.5
