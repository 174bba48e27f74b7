"""Tables of what `gradient_error.py` and `ablation.py` kept with ``--out``, as docs/results/codecs.md includes them.

    python packages/dynamiq-ddp/benchmarks/codec_tables.py docs/results/codecs/*.jsonl --out docs/results/codecs

For each set of gradients: errors on a ring by number of ranks (NAME-error.md), by schedule with 8 ranks
(NAME-schedules.md), times of the codecs (NAME-time.md), and the ablation on a ring (NAME-ablation-BITS-bits.md).
Errors are those of all coordinates, times those of any ``--limit``; of two lines that measure the same, the later one
counts. Below a table stands when, and with which code, its rows were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from time_to_accuracy.records import make_tables, markdown, measured

from dynamiq_ddp.commands.compare import YARDSTICK

Line = dict[str, Any]
Rows = dict[str, dict[Any, Line]]
"""Lines by codec or change, and by what a column stands for."""

DETAILS = 8
"""Ranks of bias, cosine and schedules."""


def by(column: str, lines: Iterable[Line]) -> tuple[Rows, list[Any]]:
    """Lines as the rows of a table, and its columns, both in the order in which they were first measured."""
    rows: Rows = {}
    for line in lines:
        rows.setdefault(line["codec"], {})[line[column]] = line
    return rows, list(dict.fromkeys(key for row in rows.values() for key in row))


def table(columns: Sequence[str], cells: Iterable[Sequence[str]], *used: Rows) -> str:
    """With the origin of the lines in it."""
    lines = [line for rows in used for row in rows.values() for line in row.values()]
    return markdown(columns, cells) + "\n" + measured((line["date"], line["commit"]) for line in lines)


def factor(times: float) -> str:
    """How many times below: 304x, 6.1x, 0.06x."""
    return f"{times:.{0 if times >= 10 else 1 if times >= 0.1 else 2}f}x"


def errors(name: str, lines: Iterable[Line]) -> str:
    """The vNMSE and how many times it is below the yardstick's, and with 8 ranks bias and cosine."""
    rows, ranks = by("ranks", lines)
    yardstick = rows.get(YARDSTICK, {})
    # None with a single repeat, which then is every codec's
    biased = any(row[DETAILS]["bias"] is not None for row in rows.values() if DETAILS in row)
    details = [("bias", ".1e")] * biased + [("cosine", ".5f")] * (DETAILS in ranks)

    def cell(row: dict[int, Line], n: int) -> str:
        if n not in row:
            return ""
        vnmse = row[n]["vnmse"]
        return f"{vnmse:.2e}" + (f" ({factor(yardstick[n]['vnmse'] / vnmse)})" if n in yardstick and vnmse else "")

    def detail(row: dict[int, Line], what: str, form: str) -> str:
        value = row[DETAILS][what] if DETAILS in row else None
        return "" if value is None else f"{value:{form}}"

    cells = (
        [
            codec,
            f"{row[min(row)]['bits']:.3f}",
            *(cell(row, n) for n in ranks),
            *(detail(row, what, form) for what, form in details),
        ]
        for codec, row in rows.items()
    )
    columns = *(f"n = {n}" for n in ranks), *(f"{what}, n = {DETAILS}" for what, _ in details)
    return table((name, "bits", *columns), cells, rows)


def by_schedule(name: str, lines: Iterable[Line]) -> str:
    """The vNMSE."""
    rows, schedules = by("schedule", lines)
    cells = (
        [codec, *(f"{row[at]['vnmse']:.2e}" if at in row else "" for at in schedules)] for codec, row in rows.items()
    )
    return table((f"n = {DETAILS}, {name}", *schedules), cells, rows)


def nanoseconds(row: dict[Any, Line], ranks: Iterable[int], digits: int) -> Iterator[str]:
    """The cells of a row of times."""
    return (f"{row[n]['nanoseconds']:.{digits}f}" if n in row else "" for n in ranks)


def times(lines: Iterable[Line]) -> str:
    """Nanoseconds per coordinate."""
    rows, ranks = by("ranks", lines)
    cells = ([codec, row[min(row)]["by"], *nanoseconds(row, ranks, 1)] for codec, row in rows.items())
    return table(("codec", "by", *(f"ns per coordinate, n = {n}" for n in ranks)), cells, rows)


def ablation(lines: Iterable[Line], timed: Iterable[Line]) -> str:
    """The vNMSE and its ratio to the full codec's, and nanoseconds per coordinate."""
    rows, ranks = by("ranks", lines)
    seconds, of_ranks = by("ranks", timed)
    cells = (
        [
            change,
            f"{row[min(row)]['bits']:.3f}",
            *(f"{row[n]['vnmse']:.2e} ({row[n]['factor']:.2f})" if n in row else "" for n in ranks),
            *nanoseconds(seconds.get(change, {}), of_ranks, 2),
        ]
        for change, row in rows.items()
    )
    columns = *(f"n = {n}" for n in ranks), *(f"ns per coordinate, n = {n}" for n in of_ranks)
    return table(("change", "bits", *columns), cells, rows, seconds)


def tables(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """Names of files, and what is in them."""
    for name in dict.fromkeys(line["gradients"] for line in lines):
        codecs, changes = (
            [line for line in lines if line["gradients"] == name and ("factor" in line) == changed]
            for changed in (False, True)
        )
        whole = [line for line in codecs if line["limit"] is None]
        if ring := [line for line in whole if line["schedule"] == "ring"]:
            yield f"{name}-error", errors(name, ring)
        detailed = [line for line in whole if line["ranks"] == DETAILS]
        if len({line["schedule"] for line in detailed}) > 1:
            yield f"{name}-schedules", by_schedule(name, detailed)
        if timed := [line for line in codecs if line["nanoseconds"] is not None]:
            yield f"{name}-time", times(timed)
        for budget in dict.fromkeys(line["budget"] for line in changes):
            mine = [line for line in changes if line["budget"] == budget and line["schedule"] == "ring"]
            timed = [line for line in mine if line["nanoseconds"] is not None]
            if ring := [line for line in mine if line["limit"] is None]:
                yield f"{name}-ablation-{budget:g}-bits", ablation(ring, timed)


if __name__ == "__main__":
    make_tables(__doc__, tables)
