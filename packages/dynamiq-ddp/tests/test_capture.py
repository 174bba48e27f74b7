"""Gradients kept on their way through DDP's hook are those that each rank had, and training is as without."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError
from dynamiq_ddp.capture import capture
from dynamiq_ddp.gradient_files import load_gradients

_GENERATOR = threading.Lock()
"""Ranks are threads here, and share torch's global generator."""


def train(group, folder: Path | None, steps: int = 3):
    """Each rank has its own input; returns this rank's own gradients by step, and the parameters at the end."""
    rank = group.rank()
    with _GENERATOR, torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
    net = torch.nn.Sequential(*layers)
    # Buckets of one layer each.
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
    if folder is not None:
        capture(model, folder, steps=[0, 2], process_group=group)
    own = []
    for step in range(steps):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        with model.no_sync():
            model(x).square().mean().backward()
        own.append({name: p.grad.clone() for name, p in net.named_parameters()})
        net.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return own, torch.cat([p.detach().flatten() for p in net.parameters()])


def test_each_rank_writes_its_own_gradients_and_training_is_unchanged(ddp_ranks, tmp_path):
    plain = ddp_ranks(2, lambda group: train(group, None))
    kept = ddp_ranks(2, lambda group: train(group, tmp_path / "deep" / "folder"))
    for (_, before), (_, after) in zip(plain, kept, strict=True):
        assert torch.equal(before, after)
    files = sorted((tmp_path / "deep" / "folder").iterdir())
    assert [file.name for file in files] == [f"step{step}-rank0000{rank}.pt" for step in (0, 2) for rank in (0, 1)]
    for step in (0, 2):
        rows = load_gradients([file for file in files if file.name.startswith(f"step{step}")])
        for rank, (own, _) in enumerate(kept):
            expected = torch.cat([gradient.flatten() for gradient in own[step].values()])
            # DDP orders buckets as it likes: the values are the same, and sorted they are in the same order.
            torch.testing.assert_close(rows[rank].sort().values, expected.sort().values, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(rows[0], rows[1])


@pytest.mark.parametrize("steps", [[], [-1], [1.5], [True]])
def test_steps_that_are_no_steps_are_refused(steps, tmp_path):
    with pytest.raises(ConfigError, match="steps to capture cannot be"):
        capture(torch.nn.Linear(1, 1), tmp_path, steps=steps)


def test_a_model_that_is_not_ddps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model cannot be a Linear; allowed: a DistributedDataParallel"):
        capture(torch.nn.Linear(1, 1), tmp_path, steps=[0])
