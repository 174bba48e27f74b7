"""Foresee error and step time for numbers of ranks that one does not have.

Up to 64 ranks the real all-reduce runs in this process, and the error is measured; the codec's own expectation stands
beside it. Up to 4,096 ranks the time follows from the transport's cost model, fed with the bytes that the engine sends
and with the codec's time. The yardstick is a ring of 32 bits without a codec on the same network. Nothing overlaps in
these times: they are for a single bucket.

  Four to 1,024 ranks with 10 Gbit/s and 50 microseconds each, a gradient of 100 million coordinates:

      dynamiq-ddp simulate --ranks 4 64 1024 --numel 100000000 --bandwidth 10 --latency 50

  The error on gradients of your own, captured as for compare, and for a GPU's codec at 0.02 ns per coordinate:

      dynamiq-ddp simulate --files gradients/step100-*.pt --codec-time 0.02

Without files gradients are made: normal, with magnitudes that differ from super-group to super-group as those of a
model do, and with a part in common. They show how error grows with the ranks, and not what it is for a model.

It prints one row for each codec, schedule and number of ranks: bits on the wire per coordinate, vNMSE as measured and
as expected, milliseconds of the codec, of the network and of the yardstick, and how many times faster than that it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamiq_core import Codec, ConfigError, DynamiQ, DynamiQPlan
from dynamiq_core.statistics import squared_norms
from dynamiq_ddp.comparison import TIMED, codec_seconds
from dynamiq_ddp.gradient_files import load_gradients
from dynamiq_ddp.projection import flat_schedule, project, stock_seconds, traffic
from dynamiq_ddp.route import SCHEDULES
from dynamiq_ddp.simulate import simulate
from dynamiq_transport import Link, common_gain, gain

from . import codecs, output
from .completion import FILES, complete

MOST_SIMULATED, MOST = 64, 4096
BLOCK = 256


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate", help="error and time for numbers of ranks that one does not have", description=__doc__
    )
    numbers = [2, 4, 8, 16, 64, 256, 1024]
    known = ", ".join(SCHEDULES)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=numbers,
        metavar="N",
        help=f"numbers of ranks, 2 to {MOST:,} (default: {' '.join(map(str, numbers))})",
    )
    schedules = parser.add_argument(
        "--schedules",
        nargs="+",
        default=["ring", "butterfly"],
        metavar="SCHEDULE",
        help=f"out of {known} (default: ring butterfly)",
    )
    complete(schedules, SCHEDULES)
    codecs.add_argument(parser, ["mxfp8", "dynamiq"])
    files = parser.add_argument("--files", nargs="+", type=Path, help="gradients of your own; see compare")
    complete(files, FILES)
    parser.add_argument("--sample", type=int, default=1 << 20, help="coordinates for the error (default: 1,048,576)")
    parser.add_argument("--numel", type=int, default=25_000_000, help="coordinates for the time (default: 25,000,000)")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="Gbit/s that a rank sends (default: 10)")
    parser.add_argument("--latency", type=float, default=30.0, help="microseconds of a small message (default: 30)")
    parser.add_argument("--overhead", type=float, default=3.0, help="microseconds of a further one (default: 3)")
    parser.add_argument("--codec-time", type=float, metavar="NS", help="nanoseconds per coordinate (default: measured)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    complete(output.add_out_argument(parser), FILES)
    parser.set_defaults(run=run, on_every_rank=False)
    return parser


def run(options: argparse.Namespace) -> output.Result:
    """Measure and project."""
    output.check(options)
    _check(options)
    gradients = load_gradients(options.files, limit=options.sample) if options.files else None
    link = Link(options.latency * 1e-6, options.overhead * 1e-6, options.bandwidth * 1e9 / 8)
    records = []
    for name, codec in codecs.make_all(options.codecs, torch.device("cpu")).items():
        per_coordinate = _codec_time(options, codec)
        for schedule in options.schedules:
            for ranks in options.ranks:
                rows = _gradients(gradients, ranks, options.sample)
                error = (None, None) if rows is None else errors(codec, rows, schedule)
                statistics = codec.statistics(torch.zeros(options.numel))
                sent = traffic(codec, statistics, options.numel, schedule=schedule, ranks=ranks)
                seconds = project(
                    sent, schedule=schedule, ranks=ranks, link=link, codec_seconds=per_coordinate * options.numel
                )
                stock = stock_seconds(options.numel, ranks=ranks, link=link)
                records.append(
                    {
                        "codec": name,
                        "schedule": schedule,
                        "ranks": ranks,
                        "bits": 8 * (sent.gradient + sent.statistics) / options.numel,
                        "vnmse": error[0],
                        "expected_vnmse": error[1],
                        "statistics_seconds": seconds.statistics,
                        "codec_seconds": seconds.codec,
                        "gradient_seconds": seconds.gradient,
                        "seconds": seconds.total,
                        "ring_seconds": stock,
                        "speedup": stock / seconds.total,
                    }
                )
    document = {
        "coordinates": options.numel,
        "link": output.link_record(link),
        "gradients": "files" if options.files else "made",
        "rows": records,
    }
    return output.Result(document, _table(options, records), output.saves(options, records, document))


def errors(codec: Codec[Any], rows: Tensor, schedule: str) -> tuple[float, float | None]:
    """vNMSE over the rows [n, d] as measured in the engine, and as the codec expects it, if it says so."""
    function = flat_schedule(schedule)
    result = simulate(rows, codec=codec, schedule=schedule)
    if not isinstance(codec, DynamiQ):
        return result.vnmse, None
    ranks = len(rows)
    mean_gain = gain(function, ranks)
    plan: DynamiQPlan = codec.plan(
        codec.merge_statistics([codec.statistics(row) for row in rows]),
        rows.shape[1],
        device=rows.device,
        workers=ranks,
        chunks=function(0, ranks).chunks,
        gain=mean_gain,
    )
    squares = squared_norms(result.mean)
    expected = plan.expected_error_of(squares, growth=common_gain(function, ranks) / mean_gain)
    energy = float(rows.to(torch.float64).sum(dim=0).square().sum())
    return result.vnmse, float(expected) / energy


def made_gradients(ranks: int, numel: int) -> Tensor:
    """Gradients [n, d] with magnitudes that vary over super-groups by factors of e, and a part in common."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.exp(1.5 * torch.randn(-(-numel // BLOCK), generator=generator)).repeat_interleave(BLOCK)[:numel]
    common = torch.randn(numel, generator=generator)
    return magnitudes * (common + torch.randn(ranks, numel, generator=generator))


def _gradients(given: Tensor | None, ranks: int, sample: int) -> Tensor | None:
    """For the error; None where there are not as many, or too many to run here."""
    if ranks > MOST_SIMULATED or (given is not None and ranks > len(given)):
        return None
    return made_gradients(ranks, sample) if given is None else given[:ranks]


def _codec_time(options: argparse.Namespace, codec: Codec[Any]) -> float:
    """Seconds per coordinate."""
    if options.codec_time is not None:
        return float(options.codec_time) * 1e-9
    return codec_seconds(codec, made_gradients(2, min(options.numel, TIMED)))


def _check(options: argparse.Namespace) -> None:
    for ranks in options.ranks:
        if not 2 <= ranks <= MOST:
            raise ConfigError(f"ranks cannot be {ranks}; allowed: 2 to {MOST}")
    for name, low in (("sample", 1), ("numel", 1), ("latency", 0), ("overhead", 0), ("codec_time", 0)):
        value = getattr(options, name)
        if value is not None and not low <= value < float("inf"):
            raise ConfigError(f"{name.replace('_', '-')} cannot be {value}; allowed: at least {low}")
    if not 0 < options.bandwidth < float("inf"):
        raise ConfigError(f"bandwidth cannot be {options.bandwidth}; allowed: Gbit/s above 0")


def _table(options: argparse.Namespace, records: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["codec"],
            row["schedule"],
            f"{row['ranks']:,}",
            f"{row['bits']:.3f}",
            "" if row["vnmse"] is None else f"{row['vnmse']:.2e}",
            "" if row["expected_vnmse"] is None else f"{row['expected_vnmse']:.2e}",
            f"{1e3 * row['codec_seconds']:.1f}",
            f"{1e3 * (row['statistics_seconds'] + row['gradient_seconds']):.1f}",
            f"{1e3 * row['ring_seconds']:.1f}",
            f"{row['speedup']:.2f}",
        )
        for row in records
    ]
    columns = (
        "codec",
        "schedule",
        "ranks",
        "bits",
        "vNMSE",
        "expected",
        "codec ms",
        "network ms",
        "fp32 ring ms",
        "speedup",
    )
    title = f"{options.numel:,} coordinates, {options.bandwidth:g} Gbit/s, {options.latency:g} us"
    return output.table(
        title, columns, cells, note="Error on " + ("given" if options.files else "made") + " gradients; times by model."
    )
