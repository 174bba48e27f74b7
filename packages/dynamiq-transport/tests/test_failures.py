"""What the surviving processes see when one is killed, stopped, late, or sends something of another size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).parent / "programs" / "survivor.py"
SIZE = 4
VICTIM = SIZE // 2
TIMEOUT = 3.0
PATIENCE = 120.0  # seconds until a process counts as hung; it starts torch first


@pytest.fixture
def survivors_of() -> Iterator[Callable[[str, str], list[dict[str, Any]]]]:
    """``survivors_of(fault, pattern)`` runs the group and returns what its survivors report, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started: list[subprocess.Popen[str]] = []

    def run(fault: str, pattern: str) -> list[dict[str, Any]]:
        words = [str(word) for word in (SIZE, store.port, fault, pattern, TIMEOUT)]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err[-5000:]
        reports = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return sorted(reports, key=lambda report: int(report["rank"]))

    yield run
    for process in started:
        if process.returncode is None:  # hung, and so are its ranks
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize("pattern", ["direct", "ring"])
@pytest.mark.parametrize("fault", ["kill", "stop", "delay", "short", "long"])
def test_every_survivor_gets_an_error_and_can_go_on(
    survivors_of: Callable[[str, str], list[dict[str, Any]]], fault: str, pattern: str
) -> None:
    survivors = survivors_of(fault, pattern)
    assert [result["rank"] for result in survivors] == [rank for rank in range(SIZE) if rank != VICTIM]
    for result in survivors:
        assert result["error"] == "TransportError", result
        assert result["seconds"] < 2 * TIMEOUT, result
        assert result["second_group"] == "works", result
        assert result["left_behind"] == [0, 0], result
    if pattern == "direct":
        named = survivors
    elif fault in ("short", "long"):
        named = survivors[VICTIM:]  # in the ring only the next rank sees a wrong size as such
    else:
        named = survivors[VICTIM - 1 : VICTIM + 1]
    for result in named:
        assert VICTIM in result["peers"], result
        assert f"rank {VICTIM}" in result["message"], result
