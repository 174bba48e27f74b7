"""The tutorial's commands, run by two processes, print what the page shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent
COMMAND = re.compile(r"```console\n\$ torchrun [^\n]* docs/tutorial/train\.py([^\n]*)\n(.*?)```", re.DOTALL)
RANKS = 2
SEPARATOR = "---- next command"
NOT_RUN = " --bits 5"
"""The page says how its lines follow from those of the run that is measured as well; that is checked instead."""

ONE_AFTER_THE_OTHER = f"""
import os, runpy, sys
script, *commands = sys.argv[1:]
for command in commands:
    port, *arguments = command.split()
    os.environ["MASTER_PORT"] = port
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    if os.environ["RANK"] == "0":
        print("{SEPARATOR}")
sys.stdout.flush()
os._exit(0)
"""
"""What every rank does: all commands in one process, since to import torch takes longer than a run.

It leaves without the end of the interpreter, which a thread of torch that lets go of a tensor meanwhile would turn into
an abort of the process.
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def runs() -> list[tuple[list[str], list[str]]]:
    """For every command of the page: the lines that it shows, and those that rank 0 prints."""
    shown = [block for block in COMMAND.findall((DOCS / "tutorial.md").read_text()) if block[0] != NOT_RUN]
    assert len(shown) == 3
    commands = [f"{port} {arguments}" for port, (arguments, _) in zip(free_ports(len(shown)), shown, strict=True)]
    launch = [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(DOCS / "tutorial" / "train.py"), *commands]
    environment = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(launch, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    assert printed[1] == ""
    found = printed[0].split(SEPARATOR + "\n")
    return [(lines.splitlines(), mine.splitlines()) for (_, lines), mine in zip(shown, found[:-1], strict=True)]


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d[\d.]*(?:e[+-]\d+)?", line)]


def test_every_line_is_as_shown(runs: list[tuple[list[str], list[str]]]) -> None:
    for shown, printed in runs:
        assert len(shown) == len(printed)
        for said, found in zip(shown, printed, strict=True):
            if said.startswith("backend"):
                assert found in ("backend: numba", "backend: reference")
            elif said.startswith(("step", "vNMSE")):  # other CPUs add up in another order
                tolerance = {"abs": 0.1} if said.startswith("step") else {"rel": 0.3}
                assert numbers(found) == pytest.approx(numbers(said), **tolerance)
            else:
                assert found == said


def test_compression_changes_the_loss_little(runs: list[tuple[list[str], list[str]]]) -> None:
    plain, five, three = (numbers(printed[3])[1] for _, printed in runs)
    assert five == pytest.approx(plain, abs=0.05)
    assert three == pytest.approx(plain, abs=0.1)


def test_measuring_changes_nothing_but_what_is_sent() -> None:
    """The page shows both runs, and one step of 50 with 32 bits more: 0.64 bits, and bytes in proportion."""
    shown = {options: lines.splitlines() for options, lines in COMMAND.findall((DOCS / "tutorial.md").read_text())}
    without, measured = shown[NOT_RUN], shown[f"{NOT_RUN} --measure-every 50"]
    assert without[:5] == measured[:5]
    (bits,), (more,) = numbers(without[5]), numbers(measured[5])
    assert more - bits == pytest.approx(32 / 50, abs=0.011)
    assert numbers(measured[6])[1] / numbers(without[6])[1] == pytest.approx(more / bits, rel=2e-3)
    assert measured[7].startswith(without[7] + ", ")
    assert without[8] == measured[8]


def test_marked_lines_are_those_of_the_hook() -> None:
    (marked,) = re.findall(r"^:emphasize-lines: (.*)$", (DOCS / "tutorial.md").read_text(), re.MULTILINE)
    found = set()
    for part in marked.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    lines = (DOCS / "tutorial" / "train.py").read_text().splitlines()
    start = lines.index("state = None")
    imports = next(number for number, line in enumerate(lines) if "import DynamiQState" in line)
    assert found == {imports + 1, *range(start + 1, lines.index("", start) + 1)}
