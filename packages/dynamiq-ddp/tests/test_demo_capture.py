"""Gradients captured without communication."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from dynamiq_core.errors import ConfigError
from dynamiq_ddp.demo.capture import capture_gradients, worker_gradients
from dynamiq_ddp.demo.data import load_corpus
from dynamiq_ddp.demo.model import GPT, GPTConfig
from dynamiq_ddp.demo.recipe import Recipe

RECIPE = Recipe(
    steps=6, seed=2, batch_size=2, warmup=2, clip=0.5, model=GPTConfig(width=32, layers=1, heads=2, context=16)
)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Adam's first step is a sign: only in double precision do two orders of summation agree closely after it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def union_gradient(workers: int, steps: int) -> Tensor:
    """The same training without any worker: one batch of all sequences, one backward pass."""
    corpus = load_corpus()
    model = GPT(RECIPE.model, seed=RECIPE.seed)
    optimizer = RECIPE.optimizer(model)
    for step in range(steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.learning_rate * RECIPE.rate(step)
        parts = [RECIPE.batch(corpus, step=step, worker=worker) for worker in range(workers)]
        optimizer.zero_grad()
        model(*(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        if step < steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip)
            optimizer.step()
    return torch.cat([p.grad.flatten() for p in reversed(list(model.parameters())) if p.grad is not None])


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_mean_is_the_gradient_of_the_union_batch(steps: int) -> None:
    gradients = capture_gradients(3, steps, recipe=RECIPE)
    torch.testing.assert_close(gradients.mean(dim=0), union_gradient(3, steps), rtol=1e-8, atol=1e-12)


def test_workers_differ_and_steps_differ() -> None:
    early, late = (capture_gradients(4, steps, recipe=RECIPE) for steps in (1, 5))
    assert early.dtype == torch.float32
    assert early.shape == (4, sum(p.numel() for p in GPT(RECIPE.model).parameters()))
    cosine = torch.nn.functional.cosine_similarity(early[:, None], early[None], dim=-1)
    assert cosine.fill_diagonal_(0).max() < 0.999
    assert (early - late).norm() > 0.1 * early.norm()


def test_capture_is_one_step_of_the_stream() -> None:
    streamed = [g.clone() for g in islice(worker_gradients(2, recipe=RECIPE), 4)]
    assert torch.equal(capture_gradients(2, 3, recipe=RECIPE), streamed[3])


@pytest.mark.parametrize(
    ("workers", "steps", "message"),
    [(0, 1, "workers is 0, must be 1 or more"), (2, -1, "steps is -1"), (2, 6, "steps is 6, must be from 0 to 5")],
)
def test_range_errors_name_the_value(workers: int, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capture_gradients(workers, steps, recipe=RECIPE)
