"""Gloo between real processes: the launch, subgroups, and ranks that leave early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAMS = Path(__file__).parent / "programs"


def run(*words: str, patience: float = 400.0) -> tuple[int, str]:
    """Run Python and return the exit status and everything printed; kill all of it when it hangs."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"hung:\n{out[-5000:]}")
    return process.returncode, out


def test_conformance_under_torchrun() -> None:
    tests = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--color=no")
    program = str(PROGRAMS / "conformance_torchrun.py")
    status, out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *tests, program)
    assert status == 0, out[-8000:]
    assert out.count(" passed") == 4, out[-8000:]


def test_no_message_is_lost_when_ranks_leave_at_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    status, out = run(str(PROGRAMS / "leaver.py"), "3", str(store.port), "50")
    assert status == 0, out[-5000:]
