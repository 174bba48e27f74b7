"""Loss against wall-clock time, with every way to average gradients, on networks of several rates.

Loss by step does not depend on the network, and seconds per step do not depend on how far training is. So each is
measured once: ``train`` whole runs without a limit, and ``train --only`` a few steps on each network.

    python -m torch.distributed.run --nproc-per-node 4 packages/dynamiq-ddp/benchmarks/time_to_accuracy \\
        train gpt --steps 100 --out runs.jsonl
    python packages/dynamiq-ddp/benchmarks/network.py --ranks 4 --rate 200mbit -- \\
        python packages/dynamiq-ddp/benchmarks/time_to_accuracy train gpt --steps 100 --only 8 --network 200mbit --out runs.jsonl

Every run is a line of the file. What is there already is not run again, so that an interrupted measurement goes on.

Methods:

    fp32                        DDP without a hook
    bf16-hook                   torch's bf16_compress_hook
    powersgd:RANK               torch's PowerSGD hook with error feedback, after two plain steps
    dynamiq:5, mxfp8, ...       a codec as `dynamiq-ddp compare --help` names it, on every schedule
    dynamiq:2+                  the same with error feedback
"""  # noqa: E501  # commands are whole lines

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from methods import NAMES, methods
from tasks import TASKS
from training import Plan, Run, train

from dynamiq_core import ConfigError, DynamiQError


def read(path: Path) -> list[Run]:
    """The runs of a file."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def commit() -> str:
    """Of this checkout, with a plus if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def measure(options: argparse.Namespace) -> None:
    """Run everything that the file does not have yet, on all ranks.

    Raises:
        DynamiQError: an option is wrong, or something is missing.
    """
    if "RANK" not in os.environ:
        raise ConfigError("this runs on several ranks; start it with torchrun or another launcher")
    if options.only is not None and not 0 < options.only < options.steps:
        raise ConfigError(f"--only cannot be {options.only}; allowed: from 1 to --steps - 1")
    chosen = methods(options.methods, options.schedules)
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        # Rank 0 knows what there is to do; it alone need see the file.
        done = read(options.out) if dist.get_rank() == 0 and options.out.exists() else []
        plans = [
            plan
            for seed in options.seeds
            for method in chosen
            for plan in [Plan(options.task, method, options.steps, seed, options.network, options.only)]
            if not any(plan.is_done(run) for run in done)
        ]
        given = [plans, commit()]
        dist.broadcast_object_list(given, src=0)
        plans, at = given
        tasks = {seed: TASKS[options.task](options.steps, seed) for seed in dict.fromkeys(plan.seed for plan in plans)}
        for plan in plans:
            run = train(plan, tasks[plan.seed], at)
            if dist.get_rank() == 0:
                with options.out.open("a") as file:
                    file.write(json.dumps(run._asdict()) + "\n")
                loss = "" if run.validation_loss is None else f", validation {run.validation_loss:.4f}"
                print(f"{plan.method}, seed {plan.seed}: {sum(run.seconds):.1f} s{loss}", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    training = commands.add_parser("train", help="train with every method, on all ranks of a launcher")
    training.add_argument("task", choices=TASKS)
    training.add_argument("--methods", nargs="+", default=list(NAMES))
    training.add_argument("--schedules", nargs="+", default=["ring", "butterfly"])
    training.add_argument("--steps", type=int, default=100)
    training.add_argument("--only", type=int, help="cut every run short after so many steps, for their time")
    training.add_argument("--seeds", type=int, nargs="+", default=[0])
    training.add_argument("--network", help="what to call the network in the results, such as 200mbit")
    training.add_argument("--threads", type=int, default=1, help="of each rank")
    training.add_argument("--out", type=Path, required=True, help="file to which every run is added as a line")
    training.set_defaults(run=measure)

    options = parser.parse_args()
    try:
        options.run(options)
    except DynamiQError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
