"""What the lines of every file of results end with, and how a page shows them; `gradient_error.py` uses it, too."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def commit() -> str:
    """Of this checkout, with a plus if its packages differ from it; files of results may grow meanwhile."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/packages")
    return f"{head}{'+' if changed else ''}" or "unknown"


def now() -> str:
    """UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file, which need not exist."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def keep(path: Path, row: Mapping[str, Any], **options: Any) -> None:
    """`append` a row with the options that it was measured with, and when and with which code."""
    append(path, {**row, **options, "date": now(), "commit": commit()})


def measured(origins: Iterable[tuple[str, str]]) -> str:
    """When, and with which code: a sentence for the dates and commits of some lines."""
    ordered = sorted(origins, key=lambda origin: origin[0])
    days = dict.fromkeys(date.split()[0] for date, _ in ordered)
    commits = dict.fromkeys(at for _, at in ordered)
    return f"Measured on {enumerated(days)} at commit{'s' * (len(commits) > 1)} {enumerated(commits)}.\n"


def enumerated(words: Iterable[str]) -> str:
    """As a sentence has them: a, b and c."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def make_tables(description: str, tables: Callable[[list[dict[str, Any]]], Iterable[tuple[str, str]]]) -> None:
    """The command line of a program that makes tables, names and texts, of the lines in files of results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what --out named, in the order of its measurements")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    options = parser.parse_args()
    written = dict(tables([json.loads(line) for path in options.files for line in path.read_text().splitlines()]))
    if not written:
        parser.error("there is nothing to report: no line belongs into a table")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        options.out.joinpath(f"{name}.md").write_text(text)
