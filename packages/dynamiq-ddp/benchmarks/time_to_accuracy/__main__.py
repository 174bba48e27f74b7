r"""Loss against wall-clock time, with every way to average gradients, on networks of several rates.

Loss by step does not depend on the network, and seconds per step do not depend on how far training is. So each is
measured once: ``train`` whole runs without a limit, and ``train --only`` a few steps on each network; ``report`` puts
them together, and beside them whole runs on a limited network, which must agree.

    python packages/dynamiq-ddp/benchmarks/time_to_accuracy all gpt --out gpt.jsonl
    python packages/dynamiq-ddp/benchmarks/time_to_accuracy all minilm --out minilm.jsonl
    python packages/dynamiq-ddp/benchmarks/time_to_accuracy report gpt.jsonl minilm.jsonl --out folder

``all`` runs ``train`` many times, on four ranks and behind `network.py`, which needs the rights of root; about an hour
and a half for each task on two cores. By hand, one of its commands is

    python packages/dynamiq-ddp/benchmarks/network.py --ranks 4 --rate 200mbit -- \
        python packages/dynamiq-ddp/benchmarks/time_to_accuracy \
        train gpt --steps 100 --only 10 --network 200mbit --out gpt.jsonl

Every run is a line of the file. What is there already is not run again, so that an interrupted measurement goes on.

Methods are:

    fp32                        DDP without a hook
    bf16-hook                   torch's bf16_compress_hook
    powersgd:RANK               torch's PowerSGD hook with error feedback, after two plain steps
    dynamiq:5, mxfp8, ...       a codec as `dynamiq-ddp compare --help` names it, on every schedule
    dynamiq:2+                  the same with error feedback
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import everything
import report
import torch
import torch.distributed as dist
from capture import capture
from methods import NAMES, methods
from records import append, commit
from tasks import TASKS
from training import Plan, Run, train

from dynamiq_core import ConfigError, DynamiQError


def read(path: Path) -> list[Run]:
    """The runs of a file."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def measure(options: argparse.Namespace) -> None:
    """Run everything that the file does not have yet, on all ranks.

    Raises:
        DynamiQError: an option is wrong, or something is missing.
    """
    if "RANK" not in os.environ:
        raise ConfigError("this runs on several ranks; start it with torchrun or another launcher")
    if options.steps < 2:
        raise ConfigError(f"--steps cannot be {options.steps}; allowed: 2 or more, of which the last is not counted")
    if options.only is not None and not 0 < options.only < options.steps:
        raise ConfigError(f"--only cannot be {options.only}; allowed: from 1 to --steps - 1")
    chosen = methods(options.methods, options.schedules)
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        ranks = dist.get_world_size()
        # Rank 0 knows what there is to do; it alone need see the file.
        done = read(options.out) if dist.get_rank() == 0 and options.out.exists() else []
        plans = [
            plan
            for seed in options.seeds
            for method in chosen
            for plan in [Plan(options.task, method, ranks, options.steps, seed, options.network, options.only)]
            if not any(plan.is_done(run) for run in done)
        ]
        given = [plans, commit()]
        dist.broadcast_object_list(given, src=0)
        plans, at = given
        tasks = {seed: TASKS[options.task](options.steps, seed) for seed in dict.fromkeys(plan.seed for plan in plans)}
        for plan in plans:
            run = train(plan, tasks[plan.seed], at)
            if dist.get_rank() == 0:
                append(options.out, run._asdict())
                loss = "" if run.validation_loss is None else f", validation {run.validation_loss:.4f}"
                print(f"{plan.method}, seed {plan.seed}: {sum(run.seconds):.1f} s{loss}", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()


def tell(options: argparse.Namespace) -> None:
    """Put together what files hold."""
    report.write((run for path in options.runs for run in read(path)), options.out)


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

    whole = commands.add_parser("all", help="everything that the page of results needs, for one task")
    whole.add_argument("task", choices=TASKS)
    whole.add_argument("--out", type=Path, required=True, help="file to which every run is added as a line")
    whole.set_defaults(run=lambda options: everything.measure(options.task, options.out))

    capturing = commands.add_parser("capture", help="keep the gradients of many workers, for gradient_error.py --files")
    capturing.add_argument("task", choices=TASKS)
    capturing.add_argument("--workers", type=int, default=16)
    capturing.add_argument("--steps", type=int, default=60, help="that the learning rate is planned for")
    capturing.add_argument("--step", type=int, default=20, help="at which the gradients are kept")
    capturing.add_argument("--seed", type=int, default=0)
    capturing.add_argument("--out", type=Path, required=True, help="file for the float32 tensor [workers, d]")
    capturing.set_defaults(run=capture)

    reporting = commands.add_parser("report", help="tables and a picture of what was measured")
    reporting.add_argument("runs", type=Path, nargs="+", help="files of train")
    reporting.add_argument("--out", type=Path, required=True, help="folder for tables in Markdown and a picture")
    reporting.set_defaults(run=tell)

    options = parser.parse_args()
    try:
        options.run(options)
    except DynamiQError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the end of the interpreter: a thread of torch that comes back from a collective meanwhile, to let go of a
    # tensor, takes the process down ("terminate called without an active exception"). Everything is written by now.
    os._exit(0)


if __name__ == "__main__":
    main()
