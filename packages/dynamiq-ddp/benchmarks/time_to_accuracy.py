"""Loss against wall-clock time of the demo's model, with every way to average its gradients.

    torchrun --nproc-per-node 4 packages/dynamiq-ddp/benchmarks/time_to_accuracy.py --out runs.json

or with any other launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as for ranks behind interfaces of a
limited rate. All runs start from the same parameters and see the same batches. Methods:

    fp32                        DDP without a hook
    bf16-hook                   torch's bf16_compress_hook
    powersgd:RANK               torch's PowerSGD hook, with error feedback and without its usual start of plain steps
    dynamiq:5, mxfp8, ...       a codec as the command line names it (`dynamiq-ddp compare --help`), on every schedule

A run's time is that of the slowest rank at every step, the validation at its end not counted. Rank 0 prints a table and
writes a JSON file with the loss of every step (mean over the ranks) and the second at which it was reached. The target
is the smoothed training loss at which the fp32 run ends, plus 1 %, unless --target says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError, DynamiQError
from dynamiq_ddp import DynamiQState, dynamiq_hook
from dynamiq_ddp.commands import codecs, output
from dynamiq_ddp.demo.data import load_corpus
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.demo.report import smooth
from dynamiq_ddp.demo.train import Run, train

METHODS = (
    "fp32",
    "bf16-hook",
    "powersgd:4",
    "bf16",
    "mxfp8",
    "mxfp4",
    "thc:8",
    "omnireduce:8",
    "paper",
    "dynamiq:4",
    "dynamiq:5",
)
POWERSGD = "powersgd:"


class Method(NamedTuple):
    """One way to average.

    Attributes:
        name: as in `METHODS`.
        schedule: of a codec; None for what has no choice.
    """

    name: str
    schedule: str | None

    def __str__(self) -> str:
        return self.name if self.schedule is None else f"{self.name}, {self.schedule}"


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
            codec = codecs.make(method.name, torch.device("cpu"))
            self.state = DynamiQState(codec=codec, schedule=method.schedule)

    def __call__(self, model: DistributedDataParallel) -> None:
        if self.state is not None:
            model.register_comm_hook(self.state, dynamiq_hook)
        elif self.method.name == "bf16-hook":
            model.register_comm_hook(None, bf16_by_gloo)
        elif self.method.name.startswith(POWERSGD):
            rank = int(self.method.name.removeprefix(POWERSGD))
            # Plain steps until DDP has arranged its buckets anew, which PowerSGD needs with error feedback.
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)


def bf16_by_gloo(state, bucket):
    """torch's hook, which DDP refuses under its own name unless NCCL carries it; Gloo adds bfloat16 as well.

    Without annotations, since DDP compares them with what it expects, and here they would be text.
    """
    return bf16_compress_hook(dist.group.WORLD, bucket)


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
            codecs.make(name, torch.device("cpu"))
            chosen += [Method(name, schedule) for schedule in schedules]
    return chosen


def interface_bytes() -> int | None:
    """What this rank's network interface has sent so far; None where ranks share one, or it is unknown."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return int(counter.read_text()) if name not in ("lo", "lo0") and counter.exists() else None


def record(method: Method, run: Run, installed: Installed, sent: int | None, steps: int) -> dict[str, Any]:
    """Everything about one run; collective."""
    slowest = torch.tensor(run.step_seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    stats = None if installed.state is None else installed.state.stats()
    return {
        "method": method.name,
        "schedule": method.schedule,
        "losses": run.losses,
        "seconds": list(accumulate(slowest.tolist())),
        "validation_loss": run.validation_loss,
        "last_vnmse": run.vnmse,
        "replicas_identical": run.replicas_identical,
        "bits_per_coordinate": None if stats is None else stats.bits_per_coordinate,
        "codec_seconds": None if stats is None else stats.seconds_codec,
        "interface_bytes_per_step": None if sent is None else sent / steps,
    }


def time_to(target: float, found: dict[str, Any]) -> float | None:
    """Second at which the smoothed loss reaches a target; None if it never does."""
    reached = (at for at, loss in zip(found["seconds"], smooth(found["losses"]), strict=True) if loss <= target)
    return next(reached, None)


def show(found: Sequence[dict[str, Any]], target: float) -> None:
    """The table: losses, times, and traffic."""
    reference = next((time_to(target, each) for each in found if each["method"] == "fp32"), None)
    cells = []
    for each in found:
        at = time_to(target, each)
        sent = each["interface_bytes_per_step"]
        cells.append(
            (
                str(Method(each["method"], each["schedule"])),
                "" if each["bits_per_coordinate"] is None else f"{each['bits_per_coordinate']:.2f}",
                f"{each['validation_loss']:.4f}",
                f"{1e3 * each['seconds'][-1] / len(each['seconds']):.0f}",
                "never" if at is None else f"{at:.1f}",
                "" if at is None or reference is None else f"{reference / at:.2f}",
                "" if sent is None else f"{sent / 1e6:.2f}",
                "yes" if each["replicas_identical"] else "NO",
            )
        )
    columns = (
        "method",
        "bits",
        "validation",
        "ms per step",
        "s to target",
        "times fp32",
        "MB sent per step",
        "identical",
    )
    print(output.table(f"{dist.get_world_size()} ranks, target {target:.4f} nats per byte", columns, cells))


def main() -> None:
    """Run every method, one after the other, on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--schedules", nargs="+", default=["ring", "butterfly"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, help="training loss to reach, in nats per byte")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--out", type=Path, help="JSON file; written anew after every run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        if "RANK" not in os.environ:
            raise ConfigError("this runs on several ranks; start it with torchrun or another launcher")
        chosen = methods(options.methods, options.schedules)
        recipe = Recipe(steps=options.steps, seed=options.seed)
    except DynamiQError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        found = measure(chosen, recipe, options)
        if dist.get_rank() == 0:
            yardstick = next((each for each in found if each["method"] == "fp32"), found[0])
            show(found, options.target or 1.01 * smooth(yardstick["losses"])[-1])
    finally:
        dist.destroy_process_group()


def measure(chosen: Sequence[Method], recipe: Recipe, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs; rank 0 keeps the file up to date, so that nothing is lost when a later run fails."""
    corpus = load_corpus()
    found: list[dict[str, Any]] = []
    for method in chosen:
        installed = Installed(method)
        dist.barrier()
        before = interface_bytes()
        run = train(installed, recipe=recipe, corpus=corpus)
        after = interface_bytes()
        sent = None if before is None or after is None else after - before
        found.append(record(method, run, installed, sent, recipe.steps))
        if installed.state is not None:
            installed.state.close()
        if dist.get_rank() == 0:
            seconds = found[-1]["seconds"][-1]
            print(f"{method}: {seconds:.1f} s, validation {run.validation_loss:.4f}", file=sys.stderr, flush=True)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                facts = {"ranks": dist.get_world_size(), "steps": recipe.steps, "seed": recipe.seed}
                options.out.write_text(json.dumps({**facts, "runs": found}) + "\n")
    return found


if __name__ == "__main__":
    main()
