"""Gradients of many workers at one step of training, without any communication: for `gradient_error.py --files`."""

from __future__ import annotations

import argparse

import torch
from tasks import TASKS, Task
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import trange

from dynamiq_core import ConfigError


def gradients_at(step: int, task: Task, workers: int) -> Tensor:
    """Train with the exact mean up to a step: what every rank would hand to the hook there, float32 [workers, d].

    Parameters come in about the order in which DDP fills its buckets, the last one first.
    """
    model = task.model()
    parameters = list(model.parameters())[::-1]
    sizes = [parameter.numel() for parameter in parameters]
    optimizer = task.optimizer(model)
    schedule = LambdaLR(optimizer, task.rate)
    gradients = torch.empty(workers, sum(sizes))
    for now in trange(step + 1, unit="step", leave=False):
        for worker, row in enumerate(gradients):
            parts = torch.autograd.grad(model(*task.batch(now, worker)), parameters)
            torch.cat([part.flatten() for part in parts], out=row)
        if now < step:
            for parameter, part in zip(parameters, torch.split(gradients.mean(dim=0), sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            nn.utils.clip_grad_norm_(parameters, task.clip)
            optimizer.step()
            schedule.step()
    return gradients


def capture(options: argparse.Namespace) -> None:
    """The command.

    Raises:
        ConfigError: an option is out of range.
    """
    if not 0 <= options.step < options.steps or options.workers < 1:
        raise ConfigError("--step must be from 0 to --steps - 1, and --workers at least 1")
    found = gradients_at(options.step, TASKS[options.task](options.steps, options.seed), options.workers)
    torch.save(found, options.out)
    print(f"{options.out}: {found.shape[0]} gradients of {found.shape[1]:,} coordinates")
