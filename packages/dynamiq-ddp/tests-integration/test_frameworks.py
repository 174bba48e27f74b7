"""Training with the hook inside the frameworks that people use, against the plain all-reduce in the same framework.

Two real processes each. ``nox -s "frameworks(lightning)"`` installs the framework and runs its test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 30
BITS = 5.0


def launch(framework: str, folder: Path) -> list[dict[str, Any]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*launcher, "--nproc-per-node=2", str(PROGRAMS / f"with_{framework}.py"), str(folder)]
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, "ACCELERATE_USE_CPU": "true"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    ranks: list[dict[str, Any]] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[{")))
    assert len(ranks) == 2
    return ranks


@pytest.mark.parametrize("framework", ["torch", "lightning", "accelerate", "transformers"])
def test_it_trains_as_well_as_the_plain_all_reduce(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here; nox -s 'frameworks({framework})' does that")
    ranks = launch(framework, tmp_path)
    assert len({tuple(rank["digests"]) for rank in ranks}) == 1  # replicas are bit-identical, in both runs
    assert ranks[0]["digests"][0] != ranks[0]["digests"][1]  # and the two runs are not the same
    for rank in ranks:
        first, plain, compressed = rank["losses"]
        assert plain < first / 2
        assert compressed == pytest.approx(plain, rel=0.02)
        assert rank["steps"] == STEPS
        coordinates = 8 * rank["bytes"] / rank["bits_per_coordinate"]
        bits = 8 * (rank["bytes"] - rank["bytes_agreement"]) / coordinates
        assert 0.95 * BITS < bits <= BITS * 1.02
    if framework == "lightning":
        assert [rank["left_out"] for rank in ranks] == [0, 0]
