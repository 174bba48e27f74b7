"""One run, and what is kept of it."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from methods import Installed, Method
from records import now
from tasks import Batch, Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from dynamiq_core import vnmse
from dynamiq_ddp.demo.train import exact_gradient, flat_gradient, replicas_identical


class Run(NamedTuple):
    """What one run measured; a line of the results' file.

    Attributes:
        task: name of what was trained.
        method: that averaged its gradients.
        schedule: of the method's codec; None if it has none.
        ranks: n.
        steps: that the learning rate was planned for.
        seed: of parameters and batches.
        network: as --network names it; None where nothing limits it.
        losses: training loss of each step, mean over the ranks.
        seconds: of each step, of the slowest rank. The validation and the last step's exact gradient are not counted.
        validation_loss: after the last step; None if the run was cut short.
        vnmse: of the last step's gradient against the exact mean; None if the run was cut short.
        replicas_identical: whether all ranks end with the same bits; None if the run was cut short.
        bits_per_coordinate: as the state counts them; None for methods that are not ours.
        codec_seconds: per step, in the codec, of rank 0; None for methods that are not ours.
        bytes_per_step: sent by rank 0's network interface, headers included; None where ranks share one.
        date: when it ended, UTC.
        commit: of the code.
    """

    task: str
    method: str
    schedule: str | None
    ranks: int
    steps: int
    seed: int
    network: str | None
    losses: list[float]
    seconds: list[float]
    validation_loss: float | None
    vnmse: float | None
    replicas_identical: bool | None
    bits_per_coordinate: float | None
    codec_seconds: float | None
    bytes_per_step: float | None
    date: str
    commit: str


class Plan(NamedTuple):
    """What to run; see `Run`.

    Attributes:
        only: steps to run before the run is cut short; None to go to the end.
    """

    task: str
    method: Method
    ranks: int
    steps: int
    seed: int
    network: str | None
    only: int | None

    def is_done(self, run: Run) -> bool:
        """Whether this is a result of the plan."""
        mine = (self.task, *self.method, self.ranks, self.steps, self.seed, self.network, self.only or self.steps)
        its = (run.task, run.method, run.schedule, run.ranks, run.steps, run.seed, run.network, len(run.losses))
        return mine == its


def train(plan: Plan, task: Task, commit: str) -> Run:
    """Train on all ranks of the default process group; collective."""
    rank = dist.get_rank()
    installed = Installed(plan.method)
    model = DistributedDataParallel(task.model())
    installed(model)
    optimizer = task.optimizer(model)
    schedule = LambdaLR(optimizer, task.rate)
    losses, seconds = [], []
    exact = estimate = torch.empty(0)
    dist.barrier()
    before = sent = interface_bytes()
    for step in range(plan.only or plan.steps):
        data = task.batch(step, rank)
        last = step == plan.steps - 1
        if last:
            sent = interface_bytes()
            exact = exact_gradient(model, data)
        start = time.perf_counter()
        loss = model(*data)
        loss.backward()
        if last:
            estimate = flat_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    if plan.only is not None:
        sent = interface_bytes()
    stats = None if installed.state is None else installed.state.stats()
    traffic = None if before is None or sent is None else (sent - before) / (plan.only or plan.steps - 1)
    whole = plan.only is None
    run = Run(
        task=plan.task,
        method=plan.method.name,
        schedule=plan.method.schedule,
        ranks=plan.ranks,
        steps=plan.steps,
        seed=plan.seed,
        network=plan.network,
        losses=[round(loss, 5) for loss in over_ranks(losses, dist.ReduceOp.AVG)],
        seconds=[round(second, 5) for second in over_ranks(seconds, dist.ReduceOp.MAX)],
        validation_loss=validate(model.module, task.validation()) if whole else None,
        vnmse=vnmse(estimate, exact) if whole else None,
        replicas_identical=replicas_identical(model.module) if whole else None,
        bits_per_coordinate=None if stats is None else stats.bits_per_coordinate,
        codec_seconds=None if stats is None else stats.seconds_codec / stats.steps,
        bytes_per_step=traffic,
        date=now(),
        commit=commit,
    )
    installed.close()
    return run


def over_ranks(values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    """Reduce each number over the ranks; collective."""
    found = torch.tensor(values, dtype=torch.float64)
    if operation == dist.ReduceOp.AVG:  # which Gloo does not have
        dist.all_reduce(found)
        found /= dist.get_world_size()
    else:
        dist.all_reduce(found, op=operation)
    return [float(value) for value in found]


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch]) -> float:
    """Mean loss, of which every rank computes a share; collective."""
    mine = islice(batches, dist.get_rank(), None, dist.get_world_size())
    total = torch.zeros((), dtype=torch.float64)
    for data in mine:
        total += model(*data)
    dist.all_reduce(total)
    return total.item() / len(batches)


def interface_bytes() -> int | None:
    """What this rank's network interface has sent so far; None where ranks share one, or it is unknown."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return int(counter.read_text()) if name not in ("lo", "lo0") and counter.exists() else None
