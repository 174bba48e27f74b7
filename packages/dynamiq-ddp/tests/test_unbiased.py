"""Six-sigma tests of the bias of whole all-reduces: every schedule, every bit width, and a codec that fails them.

Every super-group has draws of its own, so a tensor that repeats 32 values is as good as many seeds; the step and the
seed are varied as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, reference
from dynamiq_ddp import simulate
from dynamiq_kernels import operations

VALUES = 32
REPEATS = 5376  # of the values in one tensor: 672 super-groups
STEPS = 2
DRAWS = REPEATS * STEPS
assert DRAWS > 10_000

WAYS = [("ring", 4), ("butterfly", 4), ("butterfly", 3), ("direct", 4), ("hierarchical:2", 4)]
"""Schedules and numbers of ranks; three ranks are no power of two, so that one folds into another first."""


def deviations(width: int, schedule: str, n: int, operations: Any, **changes: Any) -> Tensor:
    """Mean error of each of 32 values in standard deviations of that mean: normal variables if there is no bias."""
    values = torch.randn(n, VALUES, generator=torch.Generator().manual_seed(n))
    values[:, 16:] *= 0.37  # another group, another scale
    config = CodecConfig(widths=(width,), bits=width + 1, subtract_mean=False, seed=width, **changes)
    tiled, codec = values.repeat(1, REPEATS), DynamiQ(config, operations=operations)
    means = [simulate(tiled, codec=codec, schedule=schedule, step=step).mean.view(-1, VALUES) for step in range(STEPS)]
    error = torch.cat(means).double() - values.double().mean(dim=0)
    return error.mean(dim=0) / (error.std(dim=0) / DRAWS**0.5)


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize(("schedule", "n"), WAYS)
def test_every_schedule_is_unbiased_at_every_width(schedule: str, n: int, width: int) -> None:
    z = deviations(width, schedule, n, operations())
    assert z.abs().max() < 6, z
    # The values together: a chi-square variable, within six of its standard deviations.
    assert z.square().sum() < VALUES + 6 * (2 * VALUES) ** 0.5, z


@pytest.mark.parametrize("width", [2, 5, 8])
@pytest.mark.parametrize(("schedule", "n"), WAYS)
def test_a_threshold_too_low_by_a_tenth_is_caught(
    schedule: str, n: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a tenth of a gap, far less than one standard deviation."""
    honest = reference.thresholds
    monkeypatch.setattr(reference, "thresholds", lambda *args, **kwargs: 0.9 * honest(*args, **kwargs))
    assert deviations(width, schedule, n, reference, rounding="independent").abs().max() > 6
