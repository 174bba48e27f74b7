"""Codecs side by side on gradients of the demo's model: bits on the wire, vNMSE, bias, direction, and codec time.

    python packages/dynamiq-ddp/benchmarks/gradient_error.py [--ranks 2 4 8 16] [--steps 5 40] [--schedules ring]

Trains the demo's model for as long as it takes to get there; ``--files`` takes gradients that were captured before, by
``python -m dynamiq_ddp.demo.capture``, one file for each step. The factor is that against MXFP8 (E4M3) in the same row
of ranks and schedule. `codec_tables.py` makes tables of what ``--out`` keeps. On gradients of your own:
``dynamiq-ddp compare``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from time_to_accuracy.records import keep
from torch import Tensor

from dynamiq_core import DynamiQ
from dynamiq_ddp.commands import codecs
from dynamiq_ddp.commands.compare import table
from dynamiq_ddp.comparison import compare
from dynamiq_ddp.demo.capture import worker_gradients
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.gradient_files import load_gradients
from dynamiq_ddp.route import SCHEDULES


def captured(options: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """A name and gradients [n, d] for every step."""
    if options.files:
        yield from ((path.stem, load_gradients([path], limit=options.limit)) for path in options.files)
        return
    stream = worker_gradients(max(options.ranks), recipe=Recipe())
    for step, gradients in enumerate(islice(stream, max(options.steps) + 1)):
        if step in options.steps:
            yield f"step {step}", gradients[:, : options.limit].contiguous()


def main() -> None:
    """Measure, print a table for each step, with ``--json`` the rows as a last line, and with ``--out`` keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 40], help="training steps to measure at")
    parser.add_argument("--files", type=Path, nargs="+", help="gradients that exist already, instead of --steps")
    parser.add_argument("--schedules", nargs="+", default=["ring"], help=f"out of {', '.join(SCHEDULES)}")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first so many coordinates")
    parser.add_argument("--no-time", dest="timed", action="store_false")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a line of JSON")
    codecs.add_argument(parser, codecs.DEFAULT)
    options = parser.parse_args()
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit cannot be {options.limit}; allowed: 1 or more coordinates")

    torch.set_num_threads(1)  # every rank is a thread, and a codec is timed on one
    chosen = codecs.make_all(options.codecs, torch.device("cpu"))
    found = []
    for name, gradients in captured(options):
        rows = []
        for ranks in options.ranks:
            for row in compare(
                gradients[:ranks], chosen, schedules=options.schedules, repeats=options.repeats, timed=options.timed
            ):
                rows.append(row)
                found.append({"gradients": name, **row._asdict()})
                if options.out is not None:
                    codec = chosen[row.codec]
                    by = codec.operations.name if isinstance(codec, DynamiQ) else "torch"
                    keep(options.out, found[-1], by=by, limit=options.limit, repeats=options.repeats)
        print(table(rows, f"{name}: {gradients.shape[1]:,} coordinates"))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
