"""The page of the command line names the keys that ``--json`` prints: all of them, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamiq_ddp.cli import parser
from dynamiq_ddp.commands import bench
from dynamiq_ddp.demo.report import Report, Traffic
from dynamiq_ddp.demo.train import Run
from dynamiq_transport import Link, LocalTransport

PAGE = (Path(__file__).parent / "reference" / "command-line.md").read_text()


def documented(command: str, heading: str = "key") -> set[str]:
    """The keys in the first column of a command's table."""
    (section,) = re.findall(rf"^### {command}\n(.*?)(?=^### |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(rf"^\| {heading} \|.*\n\| --- .*\n((?:\|.*\n?)+)", section, re.MULTILINE)
    return {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def found(*words: str) -> Any:
    options = parser().parse_args(words)
    return options.run(options).document


@pytest.fixture
def gradients(tmp_path: Path) -> str:
    torch.save(torch.randn(2, 2000), tmp_path / "g.pt")
    return str(tmp_path / "g.pt")


def test_doctor() -> None:
    assert set(found("doctor")) == documented("doctor")


def test_compare(gradients: str) -> None:
    document = found("compare", gradients, "--codecs", "bf16", "--no-time")
    assert set(document) == documented("compare")
    assert set(document["rows"][0]) == documented("compare", "key of a row")


def test_simulate() -> None:
    words = ["--ranks", "2", "--codecs", "bf16", "--sample", "1000", "--numel", "1000", "--codec-time", "1"]
    document = found("simulate", *words)
    assert set(document) == documented("simulate")
    assert set(document["rows"][0]) == documented("simulate", "key of a row")


def test_bench() -> None:
    transport = LocalTransport.group(1)[0]
    net = bench.Network("local", transport, torch.device("cpu"), lambda: transport, lambda tensor: None)
    timing = bench.Timing(10, "bf16", "ring", "local", 1.0, 2.0)
    advice = bench.Advice(10, "bf16", 16.0, 1.0, 1.0, "ring", "ring", None)
    options = parser().parse_args(["bench"])
    document: Any = bench._report(options, net, Link(1e-3, 1e-3, 1e9), [timing], [advice]).document
    assert set(document) == documented("bench")
    assert set(document["rows"][0]) == documented("bench", "key of a row")
    assert set(document["advice"][0]) == documented("bench", "key of an advice")
    assert all(f"`{key}`" in PAGE for key in document["link"])


def test_demo() -> None:
    run = Run([1.0], [1.0], 1.0, 1.0, True)
    report = Report(run, run, Traffic(5.0, 1.0, 0.5, "numba"), ranks=2, parameters=3, seconds=1.0)
    assert set(report.figures()) == documented("demo")


def test_every_command_has_its_place() -> None:
    commands = parser()._subparsers._group_actions[0].choices
    for name, command in commands.items():
        has_json = any("--json" in action.option_strings for action in command._actions)
        assert (f"### {name}\n" in PAGE) == has_json
        assert name in PAGE


def test_nested_keys_of_the_report_are_named() -> None:
    report = found("doctor")
    nested = {*report["devices"]["cpu"], *report["chosen"], *(report["mpi"] or {})}
    assert all(f"`{key}`" in PAGE for key in nested)
