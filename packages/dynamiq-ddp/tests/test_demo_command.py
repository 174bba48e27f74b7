"""The demo as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KEYS = {
    "loss_allreduce",
    "loss_dynamiq",
    "bits_per_coordinate",
    "bytes_per_step",
    "vnmse",
    "replicas_identical",
    "backend",
    "codec_seconds_per_step",
    "seconds",
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python module on as few threads as it takes, away from the launcher's own variables."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )


LAUNCH = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dynamiq_ddp.demo")


def test_two_ranks_end_with_the_json_line(tmp_path: Path) -> None:
    done = run(*LAUNCH, "--steps", "2", "--bits", "6", "--out", "there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert "loss curves: there/loss.png" in done.stderr
    assert set(figures) == KEYS
    assert figures["replicas_identical"] is True
    assert figures["loss_dynamiq"] == pytest.approx(figures["loss_allreduce"], rel=5e-3)
    assert 5 < figures["bits_per_coordinate"] <= 6
    assert 1e-7 < figures["vnmse"] < 1e-2
    # Two ranks: each sends half of the gradient in either phase.
    assert figures["bytes_per_step"] == pytest.approx(3_281_408 * figures["bits_per_coordinate"] / 8, rel=0.02)
    assert (tmp_path / "there" / "loss.png").stat().st_size > 10_000


def test_without_matplotlib_only_who_asks_for_a_picture_gets_an_error(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    done = run(*LAUNCH, "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'loss curves: not drawn, which needs matplotlib: pip install "dynamiq-ddp[plot]"' in done.stderr
    assert not (tmp_path / "demo-output").exists()
    asked = run("dynamiq_ddp.demo", "--out", "there", cwd=tmp_path)
    assert asked.returncode == 2
    assert asked.stderr == 'error: a picture needs matplotlib: pip install "dynamiq-ddp[plot]"\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "start it as"),
        (("--steps", "0"), "steps is 0, must be 1 or more"),
        (("--bits", "0.01"), "0.01"),
        (("--backend", "no"), "not 'no'"),
    ],
)
def test_errors_are_one_message(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run("dynamiq_ddp.demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_capture_writes_the_gradients(tmp_path: Path) -> None:
    done = run("dynamiq_ddp.demo.capture", "--workers", "2", "--steps", "1", "--out", "g.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gradients = torch.load(tmp_path / "g.pt")
    assert gradients.shape == (2, 3_281_408)
    assert gradients.norm(dim=1).gt(0).all()


def test_capture_names_a_bad_value(tmp_path: Path) -> None:
    done = run("dynamiq_ddp.demo.capture", "--workers", "0", "--out", "g.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert "workers is 0, must be 1 or more" in done.stderr
    assert not (tmp_path / "g.pt").exists()
