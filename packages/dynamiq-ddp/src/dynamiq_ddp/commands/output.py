"""What a command has found: for the eye, for other programs, and for files."""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.table import Table

from dynamiq_core import ConfigError
from dynamiq_transport import Link

Record = Mapping[str, Any]

FORMATS = (".csv", ".json")
MATPLOTLIB = 'matplotlib: pip install "dynamiq-ddp[plot]"'


class Result(NamedTuple):
    """What one run of a command has found.

    Attributes:
        document: for ``--json``.
        text: the same for the eye.
        saves: write the files that were asked for. All of them run, after the result is printed: neither a file nor a
            standard output that cannot be written costs what was measured.
    """

    document: Record
    text: str
    saves: Sequence[Callable[[], object]] = ()


def add_out_argument(parser: argparse.ArgumentParser) -> argparse.Action:
    """The option ``--out``."""
    return parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows to a .csv or .json file")


def check(options: argparse.Namespace) -> None:
    """Refuse a file that could not be written before anything is measured; missing folders are made.

    Raises:
        ConfigError: the file is of another kind.
        OSError: its folder cannot be made.
    """
    if options.out is None:
        return
    if options.out.suffix not in FORMATS:
        raise ConfigError(f"out cannot be {str(options.out)!r}; allowed: a name that ends in {' or '.join(FORMATS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib as matplotlib
    except ImportError:
        return False
    return True


def check_picture(path: Path) -> None:
    """The same for a picture.

    Raises:
        ConfigError: matplotlib is not installed, or cannot draw such a file.
        OSError: its folder cannot be made.
    """
    if not can_draw():
        raise ConfigError(f"a picture needs {MATPLOTLIB}")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"plot cannot be {str(path)!r}; allowed: a name that ends in .{', .'.join(sorted(formats))}")
    path.parent.mkdir(parents=True, exist_ok=True)


def saves(options: argparse.Namespace, records: Sequence[Record], document: Record) -> list[Callable[[], object]]:
    """What ``--out`` asks for.

    Args:
        options: of the command.
        records: rows, all with the same keys.
        document: of the result.
    """
    return [] if options.out is None else [partial(_write, options.out, records, document)]


def _write(path: Path, records: Sequence[Record], document: Record) -> None:
    if path.suffix == ".json":
        path.write_text(to_json(document) + "\n")
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def to_json(document: Record) -> str:
    """On one line; numbers that are not finite, for which JSON has no words, are null."""
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def link_record(link: Link) -> Record:
    """The numbers of a network under names that tell their units."""
    return {
        "latency_seconds": link.latency,
        "overhead_seconds": link.overhead,
        "bandwidth_bytes_per_second": link.bandwidth,
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str | None = None) -> str:
    """A table whose first columns are words and whose others are numbers."""
    drawn = Table(title=title, title_justify="left", caption=note, caption_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        words = all(not row[i][:1].isdigit() for row in rows)
        drawn.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return render(drawn)


def render(renderable: RenderableType) -> str:
    """As it looks on standard output, without blanks at the ends of lines and a line's end at the end."""
    console = Console()
    # Into a file or a pipe whole lines go, whatever the width of a terminal.
    width = console.width if console.is_terminal else max(console.width, 160)
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@contextmanager
def results_only() -> Iterator[None]:
    """Whatever is written to standard output meanwhile, by libraries in C too, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if os.name == "posix":  # what C holds back would come out when the process ends; Windows has no C for all
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def write(text: str) -> None:
    """Print a result.

    Raises:
        OSError: it cannot be written, for instance because the reader has gone: a `BrokenPipeError`.
    """
    try:
        print(text, flush=True)
    except OSError:
        # What is still held back would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise
