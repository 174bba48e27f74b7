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
RATES = ("100mbit", "200mbit", "1000mbit")
CHECKED = "200mbit"
"""Where whole runs show that what is put together is what happens."""


class Length(NamedTuple):
    """How long to train: to the end, and to know the pace."""

    steps: int
    only: int


LENGTHS = {"gpt": Length(100, 10), "minilm": Length(40, 5)}


def launches(task: str, out: Path) -> list[list[str]]:
    """Every command. What an earlier one has measured, a later one skips."""
    steps, only = LENGTHS[task]
    local = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    train = [str(HERE), "train", task, f"--steps={steps}", f"--out={out}"]
    main = [
        "--methods",
        "fp32",
        "powersgd:4",
        "bf16",
        "mxfp8",
        "dynamiq:5",
        "--schedules",
        "ring",
        "--seeds",
        "0",
        "1",
        "2",
    ]
    budgets = ["--methods", "dynamiq:4", "dynamiq:3", "dynamiq:2", "dynamiq:2+", "--schedules", "ring"]
    found = [
        [*local, *train, *main],
        [*local, *train, *budgets, *(["--seeds", "0", "1", "2"] if task == "gpt" else [])],
        [*local, *train, "--methods", *NAMES],
    ]
    for rate in RATES:
        network = [sys.executable, str(HERE.parent / "network.py"), f"--ranks={RANKS}", f"--rate={rate}", "--"]
        limited = [*network, sys.executable, *train, f"--network={rate}"]
        found.append([*limited, f"--only={only}", "--methods", *NAMES])
        if rate == CHECKED:
            checked = ["--methods", "fp32", "bf16-hook", "mxfp8", "dynamiq:5", "--schedules", "ring"]
            found.append([*limited, *checked])
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
