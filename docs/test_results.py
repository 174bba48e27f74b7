"""The tables of the results pages are what the committed measurements say, not what somebody typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = Path(__file__).parents[1] / "packages" / "dynamiq-ddp" / "benchmarks"


def compare_tables(folder: Path, names: list[str], program: list[str], out: Path) -> None:
    """What a program makes of a folder's measurements is what the folder has."""
    measured = sorted(folder.glob("*.jsonl"))
    assert [path.stem for path in measured] == names
    done = subprocess.run(
        [sys.executable, *program, *map(str, measured), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in out.glob("*.md")}
    assert written == {path.name: path.read_text() for path in folder.glob("*.md")}


def test_tables_of_codecs(tmp_path: Path) -> None:
    program = [str(BENCHMARKS / "codec_tables.py")]
    compare_tables(RESULTS / "codecs", ["ablation", "codecs"], program, tmp_path)


def test_tables_of_the_network(tmp_path: Path) -> None:
    program = [str(BENCHMARKS / "network_tables.py")]
    compare_tables(RESULTS / "network", ["overlap", "schedules"], program, tmp_path)


def test_tables_of_time_to_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report draws a picture as well")
    program = [str(BENCHMARKS / "time_to_accuracy"), "report"]
    compare_tables(RESULTS / "time-to-accuracy", ["gpt", "minilm"], program, tmp_path)
