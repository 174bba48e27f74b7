"""Compare codecs on gradients: bits on the wire, error, bias, direction, and the time that a codec takes.

Every codec runs in the real all-reduce, with as many ranks in one process as there are gradients.

  Gradients of your own model, three lines in its script, after DistributedDataParallel(model):

      from dynamiq_ddp.capture import capture
      capture(model, "gradients", steps=[100])

  and then

      dynamiq-ddp compare gradients/step100-*.pt
      dynamiq-ddp compare gradients/step100-*.pt --codecs mxfp8 dynamiq:4 dynamiq:5 --schedules ring butterfly

  A file may hold all ranks at once, as a tensor [ranks, coordinates] or as one tensor for each.

It prints one row for each codec, schedule and number of ranks: bits on the wire per coordinate, vNMSE and the part of
it that is bias, the cosine between the mean and the exact one, how many times less error than MXFP8, and the
nanoseconds that a rank computes per coordinate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dynamiq_core import ConfigError
from dynamiq_ddp.comparison import Row, compare
from dynamiq_ddp.gradient_files import load_gradients
from dynamiq_ddp.pictures import OURS, PLAIN, STYLE
from dynamiq_ddp.route import AUTO, SCHEDULES

from . import codecs, output
from .completion import FILES, complete

YARDSTICK = "mxfp8"


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare", help="codecs side by side on gradients of your own", description=__doc__
    )
    files = parser.add_argument("files", nargs="+", type=Path, help=".pt or .safetensors: one tensor for each rank")
    complete(files, FILES)
    codecs.add_argument(parser, codecs.DEFAULT)
    schedules = parser.add_argument(
        "--schedules",
        nargs="+",
        default=["ring"],
        metavar="SCHEDULE",
        help=f"out of {', '.join(SCHEDULES)}, hierarchical:NODE_SIZE (default: ring)",
    )
    complete(schedules, SCHEDULES)
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="only the first so many gradients (default: all)"
    )
    parser.add_argument("--limit", type=int, metavar="D", help="only the first so many coordinates (default: all)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="with other random numbers; 2 or more to see a bias (default: 2)"
    )
    device = parser.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1 (default: cpu)")
    complete(device, ("cpu", "cuda"))
    parser.add_argument("--no-time", dest="timed", action="store_false", help="do not time the codecs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    complete(output.add_out_argument(parser), FILES)
    plot = parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw error against bits, for instance to a .png"
    )
    complete(plot, FILES)
    parser.set_defaults(run=run, on_every_rank=False)
    return parser


def run(options: argparse.Namespace) -> output.Result:
    """Measure."""
    output.check(options)
    if options.plot is not None:
        output.check_picture(options.plot)
    device = _device(options.device)
    gradients = load_gradients(options.files, limit=options.limit).to(device)
    available, d = gradients.shape
    numbers = options.ranks or [available]
    if available < 2:
        raise ConfigError("gradients cannot be those of a single rank; allowed: two or more, in one file or several")
    for ranks in numbers:
        if not 2 <= ranks <= available:
            raise ConfigError(f"ranks cannot be {ranks}; allowed: 2 to {available}, for which there are gradients")
    if AUTO in options.schedules:
        raise ConfigError(f"schedules cannot be {AUTO!r}, which measures a network, and there is none between threads")
    chosen = codecs.make_all(options.codecs, device)
    rows = [
        row
        for ranks in numbers
        for row in compare(
            gradients[:ranks], chosen, schedules=options.schedules, repeats=options.repeats, timed=options.timed
        )
    ]
    records = [row._asdict() for row in rows]
    document = {"coordinates": d, "repeats": options.repeats, "rows": records}
    saves = output.saves(options, records, document)
    if options.plot is not None:
        saves.append(partial(plot, rows, options.plot))
    return output.Result(document, table(rows, f"{d:,} coordinates, {options.repeats} repeats"), saves)


def _device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: it is no such name, or there is no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device cannot be {name!r}; allowed: cpu, cuda or cuda:NUMBER") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device cannot be {name!r}: {torch.cuda.device_count()} GPUs are visible here")
    return device


def table(rows: Sequence[Row], title: str) -> str:
    """The rows for the eye."""
    yardsticks = {(row.schedule, row.ranks): row.vnmse for row in rows if row.codec == YARDSTICK}
    cells = []
    for row in rows:
        yardstick = yardsticks.get((row.schedule, row.ranks))
        cells.append(
            (
                row.codec,
                row.schedule,
                str(row.ranks),
                f"{row.bits:.3f}",
                f"{row.vnmse:.3e}",
                "" if row.bias is None else f"{row.bias:.1e}",
                f"{row.cosine:.6f}",
                "" if yardstick is None or not row.vnmse else f"{yardstick / row.vnmse:.2f}",
                "" if row.nanoseconds is None else f"{row.nanoseconds:.1f}",
            )
        )
    columns = ("codec", "schedule", "ranks", "bits", "vNMSE", "bias", "cosine", f"times below {YARDSTICK}", "ns/coord.")
    note = "Timed on one thread: DynamiQ by its kernels, the other codecs by plain torch operations."
    return output.table(title, columns, cells, note=note if any(row.nanoseconds for row in rows) else None)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw vNMSE against bits on the wire, one panel for each schedule and number of ranks."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.schedule, row.ranks) for row in rows))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(panels), 4.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
            for row in (row for row in rows if (row.schedule, row.ranks) == panel):
                ours = row.codec.startswith(("dynamiq", "paper"))
                axes.scatter(row.bits, row.vnmse, color=OURS if ours else PLAIN, s=36, zorder=3)
                axes.annotate(row.codec, (row.bits, row.vnmse), xytext=(5, 4), textcoords="offset points", fontsize=9)
            axes.set(yscale="log", xlabel="bits on the wire per coordinate", ylabel="vNMSE")
            axes.set_title(f"{panel[0]}, {panel[1]} ranks", loc="left")
            axes.margins(x=0.2)
            axes.label_outer()
        figure.savefig(path, dpi=160)
