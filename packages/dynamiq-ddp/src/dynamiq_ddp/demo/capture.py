"""Gradients of the demo's model, one per worker, without any communication: real data for measuring a codec.

Run ``python -m dynamiq_ddp.demo.capture --workers 4 --steps 50 --out gradients.pt`` to keep them in a file.

Shapes: W workers, d parameters of the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dynamiq_core.errors import ConfigError
from dynamiq_ddp.guard import guarded

from .data import load_corpus
from .model import GPT
from .recipe import Recipe


def worker_gradients(workers: int, *, recipe: Recipe | None = None) -> Iterator[Tensor]:
    """Train on the union of the workers' batches and yield each step's gradients before they are applied.

    Every worker's gradient is what that rank of the demo would hand to the communication hook at that step of a run
    with an exact all-reduce.

    Args:
        workers: W, 1 or more.
        recipe: how to train; the demo's own when None.

    Yields:
        float32 [W, d], for every step of the recipe. Parameters come in the order in which DDP fills its buckets, the
        last one first. The tensor is overwritten by the next step.

    Raises:
        ConfigError: ``workers`` is below 1.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}, must be 1 or more")
    recipe = recipe or Recipe()
    corpus = load_corpus()
    model = GPT(recipe.model, seed=recipe.seed)
    parameters = list(model.parameters())[::-1]
    optimizer = recipe.optimizer(model)
    schedule = LambdaLR(optimizer, recipe.rate)
    gradients = torch.empty(workers, sum(p.numel() for p in parameters))
    for step in range(recipe.steps):
        for worker, row in enumerate(gradients):
            loss = model(*recipe.batch(corpus, step=step, worker=worker))
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)], out=row)
        yield gradients
        _set_gradients(parameters, gradients.mean(dim=0))
        nn.utils.clip_grad_norm_(parameters, recipe.clip)
        optimizer.step()
        schedule.step()


def capture_gradients(workers: int, steps: int, *, recipe: Recipe | None = None) -> Tensor:
    """Gradients of all workers after a number of training steps.

    Args:
        workers: W, 1 or more.
        steps: optimiser steps that come before, from 0 to one less than the recipe's.
        recipe: how to train; the demo's own when None.

    Returns:
        float32 [W, d], ordered as :func:`worker_gradients` says.

    Raises:
        ConfigError: ``workers`` or ``steps`` is out of range.
    """
    recipe = recipe or Recipe()
    if not 0 <= steps < recipe.steps:
        raise ConfigError(f"steps is {steps}, must be from 0 to {recipe.steps - 1}")
    return next(islice(worker_gradients(workers, recipe=recipe), steps, None))


def _set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def main() -> int:
    """Command line: write the captured gradients to a file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dynamiq_ddp.demo.capture", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="number of workers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="training steps that come before (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file for the float32 tensor [workers, d]")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    options = parser.parse_args()

    def work() -> int:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        gradients = capture_gradients(options.workers, options.steps, recipe=Recipe(seed=options.seed))
        torch.save(gradients, options.out)
        print(f"{options.out}: {gradients.shape[0]} gradients of {gradients.shape[1]:,} coordinates")
        return 0

    return guarded(work, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
