"""What each technique of DynamiQ is worth: the error without it, at equal bits, on gradients of the demo's model.

    python -m dynamiq_ddp.demo.capture --workers 16 --steps 40 --out g40.pt
    python packages/dynamiq-ddp/benchmarks/ablation.py g40.pt [--ranks 2 4 8 16] [--bits 5] [--schedule ring] [--json]

A row is the default codec with one thing changed, or the published one with one of our changes. Where a change
alters what a message costs, the full codec is given the same bits for the comparison; the factor is the change's vNMSE
divided by that of the full codec. `codec_tables.py` makes a table of what ``--out`` keeps. Two rows emulate what the
codec cannot be told:

* one scale for a super-group: the groups' codes are written as "the same", and their quarter of a bit is not counted;
* one bfloat16 scale for a group of 16 costs 1 bit instead of 0.3125, which leaves the codes as much less. The row is
  the full codec with that much less, whose scales are a little larger than the maxima; exact ones would gain from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from time_to_accuracy.records import keep
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, reference
from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.scales import EncodedScales, encode_scales
from dynamiq_ddp.commands.output import table
from dynamiq_ddp.comparison import Row, compare
from dynamiq_ddp.gradient_files import load_gradients
from dynamiq_kernels import operations, warmup

FLAT_SAVES = 8 * 8 / SUPER_GROUP
"""Bits per coordinate of 16 group codes of 4 bits."""

BFLOAT16_COSTS = 1 - (8 + 2) * 8 / SUPER_GROUP
"""Bits per coordinate of bfloat16 scales for groups, beyond what the scales in two levels take."""


class Change(NamedTuple):
    """One row.

    Attributes:
        name: what is changed.
        config: with the change, at the budget that makes bits equal.
        full: what it is compared with, at the same bits.
        emulated: bits that the engine counts and the method would not send.
        flat: whether groups have the scale of their super-group.
    """

    name: str
    config: CodecConfig
    full: CodecConfig
    emulated: float = 0.0
    flat: bool = False


def changes(bits: float) -> Iterator[Change]:
    """All rows."""
    full, paper = CodecConfig(bits=bits), CodecConfig.paper(bits=bits)
    yield Change("full: DynamiQ's default", full, full)
    # What a single width costs: codes, 4-bit group codes, a scale of 2 bytes, statistics.
    single = 4 + (8 + 2 + 4) * 8 / SUPER_GROUP
    yield Change("one width, 4 bits, for all", full.replace(widths=(4,), bits=single), full.replace(bits=single))
    yield Change("uniform levels", full.replace(bend=1.0), full)
    yield Change(
        "one scale for a super-group", full.replace(bits=bits + FLAT_SAVES), full, emulated=FLAT_SAVES, flat=True
    )
    yield Change(
        "a bfloat16 scale for each group", full.replace(bits=bits - BFLOAT16_COSTS), full, emulated=-BFLOAT16_COSTS
    )
    yield Change("mean not subtracted", full.replace(subtract_mean=False), full)
    yield Change("independent rounding", full.replace(rounding="independent"), full)
    yield Change("correlated rounding (paper)", full.replace(rounding="correlated"), full)
    yield Change("squared error alone (paper)", full.replace(tolerance=1.0), full)
    yield Change("widths 2, 4, 8 (paper)", full.replace(widths=(2, 4, 8)), full)
    yield Change("linear scales of 8 bits (paper)", full.replace(scales="linear"), full)
    yield Change("paper: all of these", paper, full)
    yield Change("paper, independent rounding", paper.replace(rounding="independent"), full)
    yield Change("paper, uniform levels", paper.replace(bend=1.0), full)
    yield Change("paper, mean not subtracted", paper.replace(subtract_mean=False), full)
    yield Change("paper with our widths", paper.replace(widths=full.widths, tolerance=full.tolerance), full)
    yield Change("paper with our scales", paper.replace(scales="log"), full)
    yield Change("paper with our dither", paper.replace(rounding="dithered"), full)


def one_scale(maxima: Tensor, kind: str, draw: Tensor | None) -> EncodedScales:
    """Instead of `encode_scales`: every group as large as the largest."""
    return encode_scales(maxima.amax(dim=1, keepdim=True).expand_as(maxima).contiguous(), kind, draw)


def measure(change: Change, gradients: Tensor, *, schedule: str, repeats: int, timed: bool) -> Row:
    """The row of one change for one set of gradients [n, d]."""
    fast = operations("auto", gradients.device)
    patch: AbstractContextManager[object] = nullcontext()
    if change.flat:
        patch = mock.patch.object(reference.scales, "encode_scales", one_scale)
    else:
        warmup(fast, gradients.device, config=change.config)
    codec = DynamiQ(change.config, operations=reference if change.flat else fast)
    with patch:
        (row,) = compare(
            gradients,
            {change.name: codec},
            schedules=[schedule],
            repeats=repeats,
            timed=timed and not change.flat,
        )
    return row._replace(bits=row.bits - change.emulated)


def main() -> None:
    """Measure, print a table for each number of ranks, with ``--json`` the rows, and with ``--out`` keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="captured gradients")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--schedule", default="ring")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first so many coordinates")
    parser.add_argument("--no-time", dest="timed", action="store_false")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a line of JSON")
    options = parser.parse_args()

    torch.set_num_threads(1)
    gradients = load_gradients(options.files, limit=options.limit)
    measured: dict[tuple[CodecConfig, int], float] = {}
    found = []
    for ranks in options.ranks:
        cells = []
        for change in changes(options.bits):
            row = measure(
                change, gradients[:ranks], schedule=options.schedule, repeats=options.repeats, timed=options.timed
            )
            if (change.full, ranks) not in measured:
                same = Change("", change.full, change.full)
                full = row if change.config == change.full and not change.flat else None
                full = full or measure(
                    same, gradients[:ranks], schedule=options.schedule, repeats=options.repeats, timed=False
                )
                measured[change.full, ranks] = full.vnmse
            factor = row.vnmse / measured[change.full, ranks]
            time = "" if row.nanoseconds is None else f"{row.nanoseconds:.2f}"
            cells.append(
                (
                    row.codec,
                    f"{row.bits:.3f}",
                    f"{row.vnmse:.3e}",
                    "" if row.bias is None else f"{row.bias:.1e}",
                    f"{factor:.2f}",
                    time,
                )
            )
            found.append({**row._asdict(), "factor": factor})
            if options.out is not None:
                gradients_of = " ".join(path.stem for path in options.files)
                how = {"budget": options.bits, "limit": options.limit, "repeats": options.repeats}
                keep(options.out, {"gradients": gradients_of, **found[-1]}, **how)
        title = f"{ranks} ranks, {options.schedule}, {gradients.shape[1]:,} coordinates"
        print(table(title, ("change", "bits", "vNMSE", "bias", "times full", "ns/coord."), cells))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
