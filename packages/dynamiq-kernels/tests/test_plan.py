"""The plan of every backend against that of core, bit by bit, also for statistics that no gradient should have."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQPlan, reference
from dynamiq_core.allocation import Step
from dynamiq_core.plan import PlanTerms, plan_terms
from dynamiq_core.rounding import Key
from dynamiq_core.statistics import super_groups

SIZES = [1, 257, 5000, 70001, 300000]
SHAPES = [(1, 1, 1.0), (2, 2, 1.5), (4, 4, 2.5), (7, 3, 0.1), (100, 100, 50.5)]
"""Workers, chunks and gain."""
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
    # Triton's interpreter takes a good part of a second for each chunk, however long it is.
    slow = subject.operations.name == "triton" and subject.device.type == "cpu"
    for numel in [70001] if slow else SIZES:
        rows = torch.randn(super_groups(numel), 2, generator=generator) * torch.tensor([0.3, 1.0])
        rows[:, 1].abs_()
        statistics = KINDS[kind](rows, generator).to(torch.bfloat16)
        for workers, chunks, gain in [(7, 3, 0.1)] if slow else SHAPES:
            shared = {"config": config, "key": Key(1, 2, 3), "workers": workers, "chunks": chunks, "gain": gain}
            plan = reference.make_plan(statistics, numel, **shared)
            same(plan, subject.operations.make_plan(statistics.to(subject.device), numel, **shared))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_plans_of_every_shape(subject, gradient, shape, numel):
    """Few super-groups and many, also fewer than chunks."""
    workers, chunks, gain = shape
    statistics = reference.statistics(gradient(numel))
    shared = {"config": CodecConfig(), "key": Key(1, 2, 3), "workers": workers, "chunks": chunks, "gain": gain}
    same(
        reference.make_plan(statistics, numel, **shared),
        subject.operations.make_plan(statistics.to(subject.device), numel, **shared),
    )


def test_the_terms_of_a_plan_are_kept(subject, gradient):
    """A second plan of the same size does not derive them again, and one of another size has its own."""
    plan_terms.cache_clear()
    for numel, derived in ((5000, 1), (5000, 1), (5001, 2), (5000, 2)):
        statistics = reference.statistics(gradient(numel, numel))
        shared = {"config": CodecConfig(bits=3.0), "key": Key(1, 2, 3), "workers": 2, "chunks": 2, "gain": 1.5}
        plan = subject.operations.make_plan(statistics.to(subject.device), numel, **shared)
        same(reference.make_plan(statistics, numel, **shared), plan)
        assert plan_terms.cache_info().misses == derived


def test_ties_of_several_steps(subject, monkeypatch):
    """Where two steps have the same key, the lower one goes first, by position, until one does not fit."""
    steps = (Step(2, 64, 4.0), Step(3, 32, 1.0), Step(5, 96, 0.25))

    def terms(config, numel, chunks, gain):
        count = super_groups(numel) // chunks
        size = 64 * count + 32 * int(gain)
        return PlanTerms((size,) * chunks, (count,) * chunks, 0, 0, steps, (1.0,) * 9)

    for module in ("dynamiq_core.plan", subject.operations.make_plan.__module__):
        monkeypatch.setattr(importlib.import_module(module), "plan_terms", terms)
    numel = 256 * 24
    statistics = torch.zeros(24, 2, dtype=torch.bfloat16)
    statistics[:, 1] = 0.5 ** (torch.arange(24) % 3)  # energies of 1, 1/4 and 1/16
    found = set()
    for room in range(40):
        shared = {"config": CodecConfig(seed=987), "key": Key(1, 2, 3), "workers": 2, "chunks": 2, "gain": float(room)}
        plan = reference.make_plan(statistics, numel, **shared)
        same(plan, subject.operations.make_plan(statistics.to(subject.device), numel, **shared))
        found.add(tuple(plan.width[0].tolist()))
    assert len(found) > 15
