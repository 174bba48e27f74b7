"""The examples run as they stand, and what they print is what they promise."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d[\d.]*(?:e[+-]\d+)?", text)]


def test_codec(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "codec.py"))
    rows = [numbers(line) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [3.0, 4.0, 5.0, 6.0]
    errors = [error for *_, error in rows]
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[2] < 5e-3
    assert all(nbytes <= bits / 8 * plain / 4 for bits, nbytes, plain, _ in rows)


def test_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "schedule.py"))
    rows = {line.split()[0]: numbers(line) for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == ["ring", "butterfly", "direct", "star"]
    for name, (error, *sent) in rows.items():
        assert 0 < error < 0.05
        assert len(sent) == 4
        # In a star the middle sends the whole to three others, and each of them sends it once.
        assert sent[0] / sent[1] == pytest.approx(3 if name == "star" else 1, rel=0.05)


def test_train() -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(EXAMPLES / "train.py")]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    *steps, last = [line for line in said[0][0].splitlines() if not line.startswith("[Gloo]")]  # of torch 2.10
    losses = [numbers(line)[1] for line in steps]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    assert numbers(last)[0] == pytest.approx(5, rel=0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
