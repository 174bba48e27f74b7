"""Gradients of a real kind in half a second: the tutorial's model, trained in one process on this repository's licence.

Shapes: n ranks, d parameters.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, BATCH = 8, 64


@cache
def gradients(ranks: int, *, steps: int = 50) -> Tensor:
    """What each rank would hand to the all-reduce after a number of steps: float32 [n, d]."""
    text = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
    windows = text.unfold(0, CONTEXT + 1, 1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 128)
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    generators = [torch.Generator().manual_seed(1 + rank) for rank in range(ranks)]
    for _ in range(steps + 1):
        rows = []
        for generator in generators:
            batch = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
            loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        found = torch.stack(rows)
        mean = torch.split(found.mean(dim=0), [p.numel() for p in parameters])
        for parameter, part in zip(parameters, mean, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return found
