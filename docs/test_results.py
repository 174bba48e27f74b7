"""The tables of the results pages are what the committed measurements say, not what somebody typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the report draws a picture as well")

DOCS = Path(__file__).parent
PROGRAM = DOCS.parent / "packages" / "dynamiq-ddp" / "benchmarks" / "time_to_accuracy"
RUNS = DOCS / "results" / "time-to-accuracy"


def test_tables_of_time_to_accuracy(tmp_path: Path) -> None:
    measured = sorted(RUNS.glob("*.jsonl"))
    assert [path.stem for path in measured] == ["gpt", "minilm"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "report", *map(str, measured), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert written == {path.name: path.read_text() for path in RUNS.glob("*.md")}
