"""Measure all-reduces on your own network, beside the one that it has, and say what pays.

Start it as the training would be started, on the same machines:

    torchrun --nproc-per-node 4 --no-python dynamiq-ddp bench
    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host:29500 --no-python dynamiq-ddp bench
    mpiexec -n 4 dynamiq-ddp bench --sizes 1000000 25000000 --codecs dynamiq:4 dynamiq:5 --schedules ring butterfly

It prints a table of times. A time is that of the slowest rank, the median over the repeats. The stock all-reduce is
Gloo's, NCCL's or MPI's, in float32. What follows the table is computed from measured numbers: the network's latency and
bandwidth, and the time that a rank spends on the codec. Below the break-even bandwidth compression pays even with a
single bucket in flight.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, ConfigError
from dynamiq_ddp.comparison import TIMED, codec_seconds
from dynamiq_ddp.engine import all_reduce
from dynamiq_ddp.launched import TRANSPORTS, Network, network
from dynamiq_ddp.meter import Meter
from dynamiq_ddp.projection import break_even
from dynamiq_ddp.route import SCHEDULES
from dynamiq_transport import DEFAULT_TIMEOUT, Link, Transport, choose, gather_records, measure

from . import codecs, output
from .completion import FILES, complete

BUCKETS = 4
"""All-reduces in a row or in two lanes, to see which is faster."""


class Timing(NamedTuple):
    """One row of the table; seconds of the slowest rank."""

    coordinates: int
    codec: str
    schedule: str
    transport: str
    seconds: float
    stock_seconds: float

    @property
    def speedup(self) -> float:
        """Over the stock all-reduce; below 1 where that is faster."""
        return self.stock_seconds / self.seconds


class Advice(NamedTuple):
    """What follows for one codec and size.

    Attributes:
        coordinates: how many, d.
        codec: its name.
        bits: on the wire per coordinate.
        codec_seconds: that a rank computes.
        break_even_bytes_per_second: of a rank's connection below which compression pays.
        schedule: the fastest one that was measured.
        model: the one that the cost model chooses.
        lane_seconds: seconds of four all-reduces in one lane and in two, or None where lanes were not tried.
    """

    coordinates: int
    codec: str
    bits: float
    codec_seconds: float
    break_even_bytes_per_second: float
    schedule: str
    model: str
    lane_seconds: tuple[float, float] | None


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time all-reduces on this network, on ranks that a launcher starts", description=__doc__
    )
    sizes = [1 << 16, 1 << 20, 1 << 23]
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=sizes,
        metavar="D",
        help=f"coordinates of an all-reduce (default: {' '.join(map(str, sizes))})",
    )
    codecs.add_argument(parser, ["bf16", "dynamiq"])
    known = ", ".join(SCHEDULES)
    schedules = parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULES), metavar="SCHEDULE", help=f"out of {known} (default: all)"
    )
    complete(schedules, SCHEDULES)
    transport = parser.add_argument("--transport", help="gloo, nccl or mpi (default: by launcher and device)")
    complete(transport, TRANSPORTS)
    parser.add_argument("--repeats", type=int, default=5, help="of which the median counts (default: 5)")
    waiting = f"seconds to wait for another rank (default: {DEFAULT_TIMEOUT:g})"
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS", help=waiting)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    complete(output.add_out_argument(parser), FILES)
    parser.set_defaults(run=run, on_every_rank=True)
    return parser


def run(options: argparse.Namespace) -> output.Result | None:
    """Measure on every rank; the result on rank 0."""
    output.check(options)
    _check(options)
    with network(options.transport, timeout=options.timeout) as net:
        if net.transport.size == 1:
            raise ConfigError("an all-reduce needs 2 ranks or more; this is the only one")
        chosen = codecs.make_all(options.codecs, net.device)
        link = measure(net.transport, device=net.device)
        timings, advice = [], []
        for numel in options.sizes:
            tensor = _gradient(numel, net)
            stock = _slowest(net, options.repeats, lambda t: net.stock(t), tensor)
            for name, codec in chosen.items():
                found = [
                    Timing(numel, name, schedule, net.name, seconds, stock)
                    for schedule in options.schedules
                    for seconds in [_slowest(net, options.repeats, _reduce(codec, schedule, net), tensor)]
                ]
                timings += found
                best = min(found, key=lambda timing: timing.seconds)
                advice.append(_advise(net, link, codec, best, tensor, options.repeats))
        return _report(options, net, link, timings, advice) if net.transport.rank == 0 else None


def _gradient(numel: int, net: Network) -> Tensor:
    generator = torch.Generator().manual_seed(net.transport.rank)
    return torch.randn(numel, generator=generator).to(net.device)


def _reduce(codec: Codec[Any], schedule: str, net: Network) -> Callable[[Tensor], None]:
    def reduce(tensor: Tensor) -> None:
        all_reduce(tensor, transport=net.transport, codec=codec, schedule=schedule, check=False)

    return reduce


def _slowest(net: Network, repeats: int, function: Callable[[Tensor], None], tensor: Tensor) -> float:
    """Median seconds of the slowest rank: the same number on all ranks."""
    times = []
    for _ in range(repeats + 1):
        own = tensor.clone()
        gather_records(net.transport, b"", 0, device=net.device)  # all ranks start together
        _wait(net.device)
        began = time.perf_counter()
        function(own)
        _wait(net.device)
        times.append(time.perf_counter() - began)
    return _agree(net, statistics.median(times[1:]))  # the first one pays for compilation and connections


def _agree(net: Network, seconds: float) -> float:
    """The largest of all ranks' numbers."""
    records = gather_records(net.transport, struct.pack("<d", seconds), 8, device=net.device)
    return float(max(struct.unpack("<d", record)[0] for record in records))


def _advise(net: Network, link: Link, codec: Codec[Any], best: Timing, tensor: Tensor, repeats: int) -> Advice:
    numel, ranks = tensor.numel(), net.transport.size
    sample = torch.stack((tensor[:TIMED], tensor[:TIMED].flip(0)))
    seconds = _agree(net, codec_seconds(codec, sample) * numel)
    bits = _bits(codec, best.schedule, tensor, net)
    # MPI's libraries may forbid calls from several threads at once; there the model speaks alone.
    lanes = None if net.name == "mpi" else _lanes(net, codec, best.schedule, tensor, repeats)
    return Advice(
        coordinates=numel,
        codec=best.codec,
        bits=bits,
        codec_seconds=seconds,
        break_even_bytes_per_second=break_even(numel, ranks=ranks, bits=bits, codec_seconds=seconds),
        schedule=best.schedule,
        model=choose(numel * bits / 8, ranks, link).__name__,
        lane_seconds=lanes,
    )


def _bits(codec: Codec[Any], schedule: str, tensor: Tensor, net: Network) -> float:
    """On the wire per coordinate, by what all ranks have sent."""
    meter = Meter()
    all_reduce(tensor.clone(), transport=net.transport, codec=codec, schedule=schedule, check=False, meter=meter)
    records = gather_records(net.transport, struct.pack("<q", meter.bytes_sent), 8, device=net.device)
    sent = sum(struct.unpack("<q", record)[0] for record in records)
    return float(8 * sent / (2 * (net.transport.size - 1) * tensor.numel()))


def _lanes(net: Network, codec: Codec[Any], schedule: str, tensor: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of `BUCKETS` all-reduces in a row, and in two lanes on threads of their own."""
    first, second = net.another(), net.another()
    with first, second, ThreadPoolExecutor(max_workers=1) as pool:

        def work(transport: Transport, buckets: Sequence[int]) -> None:
            for bucket in buckets:
                all_reduce(
                    tensor.clone(), transport=transport, codec=codec, schedule=schedule, bucket=bucket, check=False
                )

        def one(_: Tensor) -> None:
            work(first, range(BUCKETS))

        def two(_: Tensor) -> None:
            other = pool.submit(work, second, range(1, BUCKETS, 2))
            work(first, range(0, BUCKETS, 2))
            other.result()

        return _slowest(net, repeats, one, tensor), _slowest(net, repeats, two, tensor)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(options: argparse.Namespace) -> None:
    for name in ("sizes", "repeats"):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise ConfigError(f"{name} cannot be {value}; allowed: at least 1")
    for schedule in options.schedules:
        if schedule not in SCHEDULES:
            raise ConfigError(f"schedule cannot be {schedule!r}; allowed: {', '.join(SCHEDULES)}")


def _report(
    options: argparse.Namespace, net: Network, link: Link, timings: Sequence[Timing], advice: Sequence[Advice]
) -> output.Result:
    records = [timing._asdict() | {"speedup": timing.speedup} for timing in timings]
    document = {
        "ranks": net.transport.size,
        "transport": net.name,
        "link": output.link_record(link),
        "advice": [each._asdict() for each in advice],
        "rows": records,
    }
    cells = [
        (
            t.codec,
            t.schedule,
            t.transport,
            f"{t.coordinates:,}",
            f"{1e3 * t.seconds:.2f}",
            f"{1e3 * t.stock_seconds:.2f}",
            f"{t.speedup:.2f}",
        )
        for t in timings
    ]
    title = (
        f"{net.transport.size} ranks: latency {1e6 * link.latency:.0f} us, {1e6 * link.overhead:.1f} us per further "
        f"message, {8 * link.bandwidth / 1e9:.2f} Gbit/s"
    )
    columns = ("codec", "schedule", "transport", "coordinates", "ms", "stock ms", "times faster")
    lines = [output.table(title, columns, cells), *(sentence(each, link) for each in advice)]
    return output.Result(document, "\n".join(lines), output.saves(options, records, document))


def sentence(advice: Advice, link: Link) -> str:
    """The advice in words."""
    here = 8 * link.bandwidth / 1e9
    even = 8 * advice.break_even_bytes_per_second / 1e9
    verdict = "pays" if advice.break_even_bytes_per_second > link.bandwidth else "does not pay"
    text = (
        f"{advice.codec} at {advice.coordinates:,} coordinates: {advice.bits:.2f} bits and "
        f"{1e3 * advice.codec_seconds:.2f} ms of codec; it pays below {even:.2f} Gbit/s, so it {verdict} "
        f"at {here:.2f}. "
        f"Fastest here: {advice.schedule}; by the model: {advice.model}."
    )
    if advice.lane_seconds is not None:
        one, two = advice.lane_seconds
        text += f" Lanes: {2 if two < one else 1} ({1e3 * one:.2f} ms with one, {1e3 * two:.2f} ms with two)."
    return text
