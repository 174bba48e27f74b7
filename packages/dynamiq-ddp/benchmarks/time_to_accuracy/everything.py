"""All measurements of a task, one after the other, as the page of the documentation needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from methods import NAMES

from dynamiq_core import DynamiQError

HERE = Path(__file__).parent
RANKS = 4
CHECKED = "200mbit"
"""Where whole runs show that what is put together is what happens."""


class Scope(NamedTuple):
    """How much of a task is measured: the larger model takes ten times as long for a step on a slow network.

    Attributes:
        methods: all of them.
        rates: of the networks.
        steps: of a whole run.
        only: of a run that shows the pace.
        seeds: of the methods in `several`.
        several: that are trained with all seeds.
        butterfly: methods that are trained over the butterfly as well as over the ring.
        checked: methods of which whole runs on a limited network show that what is put together is what happens.
    """

    methods: tuple[str, ...]
    rates: tuple[str, ...]
    steps: int
    only: int
    seeds: tuple[int, ...]
    several: tuple[str, ...]
    butterfly: tuple[str, ...]
    checked: tuple[str, ...]


SCOPES = {
    "gpt": Scope(
        methods=NAMES,
        rates=("100mbit", "200mbit", "1000mbit"),
        steps=100,
        only=8,
        seeds=(0, 1, 2),
        several=("fp32", "powersgd:4", "bf16", "mxfp8", "dynamiq:5", "dynamiq:4", "dynamiq:3", "dynamiq:2+"),
        butterfly=("bf16", "mxfp8", "dynamiq:5", "dynamiq:4"),
        checked=("fp32", "dynamiq:5"),
    ),
    "minilm": Scope(
        methods=NAMES,
        rates=("100mbit", "200mbit", "1000mbit"),
        steps=40,
        only=5,
        seeds=(0, 1, 2),
        several=("fp32", "bf16", "mxfp8", "dynamiq:5", "dynamiq:4"),
        butterfly=("bf16", "dynamiq:5"),
        checked=(),
    ),
}
EXTRA = {"gpt": ("dynamiq:2", "dynamiq-l2:5"), "minilm": ("dynamiq-l2:5",)}
"""Trained beside all others, over the ring."""


def launches(task: str, out: Path) -> list[list[str]]:
    """Every command. What an earlier one has measured, a later one skips."""
    scope = SCOPES[task]
    local = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    train = [str(HERE), "train", task, f"--steps={scope.steps}", f"--out={out}", "--methods"]
    seeds = [str(seed) for seed in scope.seeds]
    found = [
        [*local, *train, *scope.several, "--schedules", "ring", "--seeds", *seeds],
        [*local, *train, *scope.methods, *EXTRA[task], "--schedules", "ring"],
        [*local, *train, *scope.butterfly, "--schedules", "butterfly"],
    ]
    for rate in scope.rates:
        network = [sys.executable, str(HERE.parent / "network.py"), f"--ranks={RANKS}", f"--rate={rate}", "--"]
        limited = [*network, sys.executable, *train]
        short = [f"--network={rate}", f"--only={scope.only}"]
        found.append([*limited, *scope.methods, "--schedules", "ring", *short])
        found.append([*limited, *scope.butterfly, "--schedules", "butterfly", *short])
        if rate == CHECKED and scope.checked:
            found.append([*limited, *scope.checked, "--schedules", "ring", f"--network={rate}"])
    return found


def measure(task: str, out: Path) -> None:
    """Run them all; the tables and the picture are `report`'s.

    Raises:
        DynamiQError: one of them fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    out.parent.mkdir(parents=True, exist_ok=True)
    for command in launches(task, out.resolve()):
        print(" ".join(command), file=sys.stderr, flush=True)
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise DynamiQError(f"a measurement ended with status {done.returncode}: {' '.join(command)}")
