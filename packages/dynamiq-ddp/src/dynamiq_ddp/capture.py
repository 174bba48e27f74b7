"""Keeps the gradients of a training run as they reach the communication hook, to compare codecs on them later.

Annotations stay real objects here, since DDP compares them with what it expects.
"""

from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, from where its type is known
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError

from .connect import default_group


class Capture:
    """State of `capture_hook`; see `capture`.

    Attributes:
        folder: where the files go.
        steps: at which steps gradients are kept.
        step: the current one; the first backward pass with communication is step 0.
    """

    def __init__(self, folder: str | Path, steps: Collection[int], process_group: dist.ProcessGroup | None) -> None:
        if not steps or any(type(step) is not int or step < 0 for step in steps):
            raise ConfigError(f"steps to capture cannot be {steps!r}; allowed: one or more integers of at least 0")
        self.folder = Path(folder)
        self.steps = frozenset(steps)
        self.step = -1
        self.process_group = process_group
        self._parts: list[Tensor] = []

    def keep(self, index: int, gradients: Tensor, *, last: bool) -> None:
        """Take over a bucket, and write the file after the last one."""
        if index == 0:
            self.step += 1
            self._parts = []
        if self.step not in self.steps:
            return
        self._parts.append(gradients.detach().to("cpu", copy=True).flatten())
        if last:
            rank = (self.process_group or default_group()).rank()
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(torch.cat(self._parts), self.folder / f"step{self.step}-rank{rank:05d}.pt")
            self._parts = []


def capture_hook(state: Capture, bucket: GradBucket) -> Future[Tensor]:
    """Keep this rank's gradients, then average them as DDP does without a hook."""
    state.keep(bucket.index(), bucket.buffer(), last=bucket.is_last())
    return allreduce_hook(state.process_group or default_group(), bucket)


def capture(
    model: DistributedDataParallel,
    folder: str | Path,
    *,
    steps: Collection[int],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Have every rank write its own gradient at some steps, ``folder/step100-rank00003.pt``; training is unchanged.

    Three lines in a training script, after the model is wrapped and instead of another communication hook::

        from dynamiq_ddp.capture import capture

        capture(model, "gradients", steps=[100])

    and then ``dynamiq-ddp compare gradients/step100-*``.

    Args:
        model: wrapped, without a communication hook yet.
        folder: is made if it is not there; on several machines each has the files of its own ranks.
        steps: backward passes with communication after which to write; the first is 0. Before step 1 a model says
            little about gradients during training, and DDP still orders its buckets anew.
        process_group: that of the model; the default group when None.

    Raises:
        ConfigError: ``steps`` is empty or not made of integers of at least 0, or the model is another kind of module.
    """
    state = Capture(folder, steps, process_group)
    if not isinstance(model, DistributedDataParallel):  # FSDP would take the hook, and hand it something else
        raise ConfigError(f"model cannot be a {type(model).__name__}; allowed: a DistributedDataParallel")
    model.register_comm_hook(state, capture_hook)
