"""The plan of every backend against that of core, bit by bit, also for statistics that no gradient should have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQPlan, reference
from dynamiq_core.rounding import Key
from dynamiq_core.statistics import super_groups

SIZES = [1, 257, 5000, 70001, 300000]
CONFIGS = [
    CodecConfig(),
    CodecConfig(bits=1.0),
    CodecConfig(bits=9.0, subtract_mean=False),
    CodecConfig(bits=4.0, tolerance=1.0),
    CodecConfig(bits=6.0, tolerance=0.01),
    CodecConfig.paper(bits=2.75),
    CodecConfig(widths=(4,), bits=4.5),
    CodecConfig(widths=(0, 3, 5), bits=3.5, scales="linear"),
    CodecConfig(widths=(1, 2, 3), bits=2.9),
]


def loud(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Energies over the whole range of bfloat16 and beyond."""
    return rows * torch.exp(30 * torch.randn(len(rows), 1, generator=generator))


def sparse(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Super-groups without energy."""
    return rows * (torch.rand(len(rows), 1, generator=generator) < 0.6)


def tied(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Few different energies, so that ties fill what is left of a message."""
    return torch.round(rows)


def broken(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers that are not finite, in each column by itself."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return torch.where(
        torch.rand(rows.shape, generator=generator) < 0.1,
        values[torch.randint(3, rows.shape, generator=generator)],
        rows,
    )


def even(value: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda rows, generator: torch.full_like(rows, value)


KINDS = {
    "loud": loud,
    "sparse": sparse,
    "tied": tied,
    "broken": broken,
    "zero": even(0.0),
    "tiny": even(1e-40),
    "huge": even(3e38),
}


def same(a: DynamiQPlan, b: DynamiQPlan) -> None:
    assert (a.sizes, a.lengths, a.numel, a.workers) == (b.sizes, b.lengths, b.numel, b.workers)
    for name in ("mean", "rows", "scales_at", "nonzero", "energies", "errors"):
        mine, theirs = getattr(a, name), getattr(b, name).cpu()
        assert mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_plan(subject, config, kind):
    generator = torch.Generator().manual_seed(len(kind))
    for numel in SIZES:
        rows = torch.randn(super_groups(numel), 2, generator=generator) * torch.tensor([0.3, 1.0])
        rows[:, 1].abs_()
        statistics = KINDS[kind](rows, generator).to(torch.bfloat16)
        for workers, chunks, gain in ((1, 1, 1.0), (2, 2, 1.5), (4, 4, 2.5), (7, 3, 0.1), (100, 100, 50.5)):
            shared = {"config": config, "key": Key(1, 2, 3), "workers": workers, "chunks": chunks, "gain": gain}
            plan = reference.make_plan(statistics, numel, **shared)
            same(plan, subject.operations.make_plan(statistics.to(subject.device), numel, **shared))
