"""One training run under DistributedDataParallel, and what it measures on the way.

Shapes: d parameters of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from dynamiq_core import vnmse

from .data import Batch, Corpus, batch
from .model import GPT
from .recipe import Recipe

VALIDATION_BATCHES = 16
VALIDATION_BATCH_SIZE = 32

Install = Callable[[DistributedDataParallel], None]
"""Prepares the wrapped model before the first step: the place to register a communication hook."""

Watch = Callable[[int, float, float], None]
"""Called after every step with its index, this rank's loss and the step's seconds."""


class Run(NamedTuple):
    """What a run measured. All but ``step_seconds`` are the same on every rank.

    Attributes:
        losses: training loss of every step in nats per byte, mean over the ranks.
        step_seconds: time of every step on this rank.
        validation_loss: nats per byte after the last step.
        vnmse: error of the last step's synchronised gradient against the exact mean of the local ones.
        replicas_identical: whether the parameters have the same bits on every rank.
    """

    losses: list[float]
    step_seconds: list[float]
    validation_loss: float
    vnmse: float
    replicas_identical: bool


def train(install: Install, *, recipe: Recipe, corpus: Corpus, watch: Watch | None = None) -> Run:
    """Train the demo's model from scratch on all ranks of the default process group.

    Args:
        install: prepares the wrapped model; see :data:`Install`.
        recipe: how to train; two runs of the same recipe see the same parameters and batches.
        corpus: text to train and validate on.
        watch: called after every step; see :data:`Watch`.
    """
    rank = dist.get_rank()
    model = DistributedDataParallel(GPT(recipe.model, seed=recipe.seed))
    install(model)
    optimizer = recipe.optimizer(model)
    schedule = LambdaLR(optimizer, recipe.rate)
    losses, seconds = [], []
    exact = estimate = torch.empty(0)
    for step in range(recipe.steps):
        data = recipe.batch(corpus, step=step, worker=rank)
        last = step == recipe.steps - 1
        if last:
            exact = exact_gradient(model, data)
        start = time.perf_counter()
        loss = model(*data)
        loss.backward()
        if last:
            estimate = flat_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if watch is not None:
            watch(step, losses[-1], seconds[-1])
    return Run(
        losses=_mean(torch.tensor(losses, dtype=torch.float64)).tolist(),
        step_seconds=seconds,
        validation_loss=validate(model.module, recipe=recipe, corpus=corpus),
        vnmse=vnmse(estimate, exact),
        replicas_identical=replicas_identical(model.module),
    )


def exact_gradient(model: DistributedDataParallel, data: Batch) -> Tensor:
    """Mean over the ranks of the local gradients, summed in double precision and around any hook: float64 [d].

    The model's gradients are unset before and after.
    """
    with model.no_sync():
        model(*data).backward()
    exact = _mean(flat_gradient(model).double())
    model.zero_grad()
    return exact


def flat_gradient(model: nn.Module) -> Tensor:
    """A copy of the gradients of all parameters: [d]."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def validate(model: nn.Module, *, recipe: Recipe, corpus: Corpus) -> float:
    """Loss on held-out files in nats per byte, over batches that depend on neither seed nor number of ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(dist.get_rank(), VALIDATION_BATCHES, dist.get_world_size()):
        data = batch(
            corpus.validation, size=VALIDATION_BATCH_SIZE, context=recipe.model.context, step=index, worker=0, seed=0
        )
        total += model(*data)
    dist.all_reduce(total)
    return total.item() / VALIDATION_BATCHES


def replicas_identical(model: nn.Module) -> bool:
    """Whether every rank holds the same parameters as rank 0, bit for bit."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int32)
    first = mine.clone()
    dist.broadcast(first, src=0)
    same = torch.tensor(int(torch.equal(mine, first)))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same.item())


def _mean(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()
