"""What the programs have in common: a model, data for each rank, and what is compared in the end."""

from __future__ import annotations

import json
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dynamiq_ddp import DynamiQState

BATCH = 16
STEPS = 30
WIDTH = 128


def make_model() -> nn.Module:
    """The same on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def make_data(ranks: int = 2) -> TensorDataset:
    """Inputs and what a fixed linear map makes of them, for so many steps of all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS * ranks, WIDTH, generator=generator)
    return TensorDataset(x, x @ torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """Mean squared error over all data."""
    x, y = make_data().tensors
    return float((model(x) - y).square().mean())


def digest(model: nn.Module) -> int:
    """Tells the parameters' bits apart."""
    flat: Tensor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return zlib.crc32(flat.numpy().tobytes())


def report(plain: nn.Module, compressed: nn.Module, state: DynamiQState, **more: object) -> None:
    """One JSON object, printed by every rank in one piece."""
    stats = state.stats()
    facts = {
        "losses": [loss_of(make_model()), loss_of(plain), loss_of(compressed)],
        "digests": [digest(plain), digest(compressed)],
        "steps": stats.steps,
        "bits_per_coordinate": stats.bits_per_coordinate,
        "bytes_agreement": stats.bytes_agreement,
        "bytes": stats.bytes_sent,
        **more,
    }
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, facts)
    if dist.get_rank() == 0:
        print("\n" + json.dumps(every), flush=True)
