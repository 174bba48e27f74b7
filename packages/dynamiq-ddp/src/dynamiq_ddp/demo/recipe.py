"""How the demo trains: everything that two runs share, whoever sums their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from dynamiq_core.errors import ConfigError

from .data import Batch, Corpus, batch
from .model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data and optimiser of a run; sized for four processes on two cores.

    Attributes:
        steps: optimiser steps, 1 or more.
        seed: of the initial parameters and of the batches.
        model: size of the model.
        batch_size: sequences per worker and step.
        learning_rate: peak of the schedule.
        warmup: steps until the peak; a cosine to zero follows.
        weight_decay: of AdamW, on matrices only.
        clip: largest norm of the averaged gradient that is applied as it is; a larger one is scaled down.
    """

    steps: int = 200
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}, must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}, must be 0 or more")

    def batch(self, corpus: Corpus, *, step: int, worker: int) -> Batch:
        """Training batch of one worker at one step, int64 [batch_size, context] each."""
        return batch(
            corpus.train, size=self.batch_size, context=self.model.context, step=step, worker=worker, seed=self.seed
        )

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW over the model's parameters; :meth:`rate` scales its learning rate."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95), fused=True)

    def rate(self, step: int) -> float:
        """Learning rate of a step as a fraction of the peak: linear warm-up, then a cosine to 0."""
        warm = min(1.0, (step + 1) / self.warmup)
        return warm * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
