"""Tables for the eye, for other programs, and for files."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dynamiq_core import ConfigError

Record = Mapping[str, Any]

FORMATS = (".csv", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options ``--json`` and ``--out``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows to a .csv or .json file")


def check(options: argparse.Namespace) -> None:
    """Refuse a file that could not be written before anything is measured.

    Raises:
        ConfigError: the file is of another kind.
    """
    if options.out is not None and options.out.suffix not in FORMATS:
        raise ConfigError(f"out cannot be {str(options.out)!r}; allowed: a name that ends in {' or '.join(FORMATS)}")


def write(options: argparse.Namespace, records: Sequence[Record], *, facts: Record | None = None) -> None:
    """Do what ``--json`` and ``--out`` ask for.

    Args:
        options: of the command.
        records: rows, all with the same keys.
        facts: what holds for all rows; part of the JSON.
    """
    document = json.dumps({**(facts or {}), "rows": [dict(record) for record in records]})
    if options.json:
        print(document)
    if options.out is None:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.suffix == ".json":
        options.out.write_text(document + "\n")
        return
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str | None = None) -> None:
    """Print a table whose first columns are words and whose others are numbers."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        words = all(not row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Into a file or a pipe whole lines go, whatever the width of a terminal.
    width = console.width if console.is_terminal else max(console.width, 160)
    Console(width=width, highlight=False).print(table)


def plotting() -> None:
    """Make sure that figures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError('--plot needs matplotlib: pip install "dynamiq-ddp[plot]"') from error
