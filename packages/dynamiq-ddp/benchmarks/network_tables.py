"""Tables of what `overlap.py` and `schedules.py` kept with ``--out``, as pages of docs/results include them.

    python packages/dynamiq-ddp/benchmarks/network_tables.py docs/results/network/*.jsonl --out docs/results/network

Of `overlap.py` one for each number of ranks, rate of the network, size of buckets and budget
(overlap-RANKS-RATE-MIB-BITS.md), and of `schedules.py` one for each transport and number of ranks
(schedules-TRANSPORT-RANKS.md). Of two lines that measure the same, the later one counts. Below a table stands when, and
with which code, its rows were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from time_to_accuracy.records import make_tables, markdown, measured

Line = dict[str, Any]


def overlap(lines: Sequence[Line]) -> str:
    """Milliseconds of a step, and how much of it waits for the network."""
    names = ("step", "alone", "exposed", "network", "codec")
    cells = [[line["name"], *(f"{1000 * line[name]:.0f}" for name in names), f"{ratio(line):.2f}"] for line in lines]
    columns = ("way", "step", "without communication", "exposed", "bytes / bandwidth", "codec", "ratio")
    return markdown(columns, cells)


def ratio(line: Line) -> float:
    """Exposed time to the time that it has to take at least, if nothing else is hidden."""
    return float(line["exposed"] / max(line["network"], line["codec"]))


def schedules(lines: Sequence[Line]) -> str:
    """Milliseconds of an all-reduce by megabytes: median, and in brackets the quartiles."""
    sizes = list(dict.fromkeys(line["megabytes"] for line in lines))
    cells = []
    for name in dict.fromkeys(line["name"] for line in lines):
        of_size = {line["megabytes"]: line for line in lines if line["name"] == name}
        cells.append([name, *(milliseconds(of_size[size]) if size in of_size else "" for size in sizes)])
    return markdown(("all-reduce", *(f"{size:g} MB" for size in sizes)), cells)


def milliseconds(line: Line) -> str:
    """``12.3 (11.0-14.2) ring``, with the schedule that was chosen if there was a choice."""
    low, middle, high = line["quartiles"]
    return f"{middle:.1f} ({low:.1f}-{high:.1f}) {line['chosen']}".strip()


def tables(lines: Iterable[Line]) -> Iterator[tuple[str, str]]:
    """Names of files, and what is in them."""
    kinds: dict[str, tuple[Callable[[Sequence[Line]], str], dict[tuple[Any, ...], Line]]] = {}
    for line in lines:
        if "exposed" in line:
            setup = f"{line['ranks']}-{line['rate']}-{line['bucket_mb']:g}-{line['bits']:g}"
            name, make, key = f"overlap-{setup}", overlap, (line["name"], line["parameters"])
        else:
            setup = f"{line['transport']}-{line['ranks']}"
            name, make, key = f"schedules-{setup}", schedules, (line["name"], line["megabytes"])
        kinds.setdefault(name, (make, {}))[1][key] = line
    for name, (make, found) in kinds.items():
        rows = list(found.values())
        yield name, make(rows) + "\n" + measured((line["date"], line["commit"]) for line in rows)


if __name__ == "__main__":
    make_tables(__doc__, tables)
