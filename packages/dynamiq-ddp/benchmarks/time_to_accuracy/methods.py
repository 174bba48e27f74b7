"""Ways to average gradients: DDP's own, torch's hooks, and ours with any codec and schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError
from dynamiq_ddp import DynamiQState, dynamiq_hook
from dynamiq_ddp.commands import codecs

NAMES = (
    "fp32",
    "bf16-hook",
    "powersgd:4",
    "bf16",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "thc:8",
    "omnireduce:8",
    "paper",
    "dynamiq:4",
    "dynamiq:5",
)
POWERSGD = "powersgd:"
PLAIN_STEPS = 2
"""Before PowerSGD begins: until DDP has arranged its buckets anew, which its error feedback needs."""


class Method(NamedTuple):
    """One way to average.

    Attributes:
        name: as the command line says.
        schedule: of a codec; None for what has no choice.
    """

    name: str
    schedule: str | None

    def __str__(self) -> str:
        return self.name if self.schedule is None else f"{self.name}, {self.schedule}"


def methods(names: Sequence[str], schedules: Sequence[str]) -> list[Method]:
    """What to run, checked before anything runs.

    Raises:
        ConfigError: there is no such method.
    """
    chosen = []
    for name in names:
        if name in ("fp32", "bf16-hook"):
            chosen.append(Method(name, None))
        elif name.startswith(POWERSGD):
            if not name.removeprefix(POWERSGD).isdigit() or name == f"{POWERSGD}0":
                raise ConfigError(f"method cannot be {name!r}; allowed: {POWERSGD} and a rank of at least 1")
            chosen.append(Method(name, None))
        else:
            codecs.make(name.removesuffix("+"), torch.device("cpu"))
            chosen += [Method(name, schedule) for schedule in schedules]
    return chosen


class Installed:
    """Registers a method's hook on a model.

    Attributes:
        state: of dynamiq_hook, for its figures; None for other methods.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state: DynamiQState | None = None
        if method.schedule is not None:
            # Before the clock starts, since it compiles kernels.
            codec = codecs.make(method.name.removesuffix("+"), torch.device("cpu"))
            feedback = method.name.endswith("+")
            self.state = DynamiQState(codec=codec, schedule=method.schedule, error_feedback=feedback)

    def __call__(self, model: DistributedDataParallel) -> None:
        if self.state is not None:
            model.register_comm_hook(self.state, dynamiq_hook)
        elif self.method.name == "bf16-hook":
            model.register_comm_hook(None, bf16_by_gloo)
        elif self.method.name.startswith(POWERSGD):
            rank = int(self.method.name.removeprefix(POWERSGD))
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_STEPS)
            model.register_comm_hook(state, powersgd_one_bucket_at_a_time())

    def close(self) -> None:
        """End the state's threads."""
        if self.state is not None:
            self.state.close()


def powersgd_one_bucket_at_a_time() -> Callable[..., torch.futures.Future]:
    """torch's PowerSGD hook, in which a bucket waits for the one before.

    It starts the second and third of its collectives when the one before is done. With several buckets under way, that
    is in another order on every rank: Gloo then gives a rank the numbers of another bucket, or ends the process.
    """
    under_way: list[torch.futures.Future] = []

    def hook(state, bucket):
        for before in under_way:
            before.wait()
        under_way[:] = [powerSGD_hook(state, bucket)]
        return under_way[0]

    return hook


def bf16_by_gloo(state, bucket):
    """torch's hook, which DDP refuses under its own name unless NCCL carries it; Gloo adds bfloat16 as well.

    Without annotations, since DDP compares them with what it expects, and here they would be text.
    """
    return bf16_compress_hook(dist.group.WORLD, bucket)
