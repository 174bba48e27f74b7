r"""How much of the communication a training step has to wait for, with and without compression, on a slow network.

    python packages/dynamiq-ddp/benchmarks/network.py --ranks 2 --rate 200mbit -- \
        python packages/dynamiq-ddp/benchmarks/overlap.py [--bits 5] [--steps 5] [--lanes 1 2 3]

Every rank runs it; rank 0 prints. A step is a forward and a backward pass. It takes turns with one under ``no_sync``,
so that both meet the same machine, and what the step takes longer is the exposed time. Overlap is complete when the
exposed time is the larger one of the network's time (bytes sent by a rank over the bandwidth measured in the same run)
and the codec's (``seconds_codec`` of ``state.stats()``, over all lanes); the last column is the ratio to that. Where
the backward pass is long, exposed time falls below it. `network_tables.py` makes tables of what ``--out`` keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from time_to_accuracy.records import keep
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from dynamiq_ddp import DynamiQState, Stats, dynamiq_hook
from dynamiq_transport import TorchTransport, measure

WARM_UP = 3  # DDP rearranges its buckets after the first


class Row(NamedTuple):
    """One way to average gradients; seconds and bytes per step, those of the rank that has most."""

    name: str
    step: float
    alone: float
    exposed: float
    bytes: float
    network: float
    codec: float
    phase_1: float

    @property
    def ratio(self) -> float:
        """Exposed time to the time that it has to take at least, if nothing else is hidden."""
        return self.exposed / max(self.network, self.codec)


class Setup(NamedTuple):
    """What all ways have in common."""

    model: Callable[[], nn.Module]
    batch: Tensor
    steps: int
    bucket_mb: float
    bandwidth: float


def bf16_over_gloo(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """``bf16_compress_hook`` under another name: DDP knows that one by name, and allows it with NCCL only."""
    return bf16_compress_hook(group, bucket)


def network_model(options: argparse.Namespace) -> Callable[[], nn.Module]:
    """A stack of square layers, about one for each bucket."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.layers)]
        return nn.Sequential(*layers)

    return make


def seconds(ddp: DistributedDataParallel, batch: Tensor) -> float:
    """Of one step, that all ranks begin together."""
    ddp.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    ddp(batch).square().mean().backward()
    return time.perf_counter() - began


def measure_way(name: str, setup: Setup, state: DynamiQState | None, hook: Callable[..., object] | None) -> Row:
    """Time one way of averaging."""
    ddp = DistributedDataParallel(setup.model(), bucket_cap_mb=setup.bucket_mb)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for _ in range(WARM_UP):
        seconds(ddp, setup.batch)
    before = None if state is None else state.stats()
    synced, alone = [], []
    for _ in range(setup.steps):
        synced.append(seconds(ddp, setup.batch))
        with ddp.no_sync():
            alone.append(seconds(ddp, setup.batch))
    exposed = statistics.median(a - b for a, b in zip(synced, alone, strict=True))
    if state is None or before is None:
        n, numel = dist.get_world_size(), sum(p.numel() for p in ddp.parameters())
        sent = 2 * (n - 1) / n * numel * (4.0 if hook is None else 2.0)  # of Gloo's ring, headers left out
        codec = phase_1 = 0.0
    else:
        sent, codec, phase_1 = per_step(before, state.stats())
        state.close()
    median = statistics.median
    numbers = torch.tensor([median(synced), median(alone), exposed, sent, sent / setup.bandwidth, codec, phase_1])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return Row(name, *numbers.tolist())


def per_step(before: Stats, after: Stats) -> tuple[float, float, float]:
    """Bytes sent, seconds in the codec, seconds in phase 1."""
    steps = after.steps - before.steps
    names = ("bytes_sent", "seconds_codec", "seconds_statistics")
    sent, codec, phase_1 = ((getattr(after, name) - getattr(before, name)) / steps for name in names)
    return sent, codec, phase_1


def main() -> None:
    """Measure, print a table, with ``--json`` the rows as a last line, and with ``--out`` keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--schedules", nargs="*", default=["ring", "butterfly", "direct"])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=5, help="measured for each way, after some to warm up")
    parser.add_argument("--skip-uncompressed", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a line of JSON")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with TorchTransport.dedicated() as transport:
        link = measure(transport, repeats=5)
    batch = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(rank))
    setup = Setup(network_model(options), batch, options.steps, options.bucket_mb, link.bandwidth)
    numel = sum(p.numel() for p in setup.model().parameters())
    rate = os.environ.get("NETWORK_RATE", "unlimited")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        milliseconds = [1000 * value for value in (row.step, row.alone, row.exposed, row.network, row.codec)]
        cells = [row.name, *(f"{ms:.0f}" for ms in milliseconds), f"{1000 * row.phase_1:.0f}", f"{row.ratio:.2f}"]
        if rank == 0:
            print(f"| {' | '.join(cells)} |", flush=True)
            if options.out is not None:
                setup = {"rate": rate, "ranks": size, "parameters": numel, "bucket_mb": options.bucket_mb}
                keep(options.out, {**setup, **row._asdict()}, bits=options.bits, steps=options.steps)

    if rank == 0:
        print(
            f"{size} ranks on {os.cpu_count()} cores, {torch.get_num_threads()} threads each; {numel:,} parameters in "
            f"{options.layers} layers, buckets of {options.bucket_mb:g} MiB, batch {options.batch}; link: "
            f"{8 * link.bandwidth / 1e6:.0f} Mbit/s of payload, latency {1e6 * link.latency:.0f} us"
        )
        print("| way | step, ms | without communication | exposed | bytes / bandwidth | codec | phase 1 | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    if not options.skip_uncompressed:
        show(measure_way("all-reduce", setup, None, None))
        show(measure_way("bf16_compress_hook", setup, None, bf16_over_gloo))
    for schedule in options.schedules:
        for lanes in options.lanes:
            state = DynamiQState(bits=options.bits, schedule=schedule, lanes=lanes)
            show(measure_way(f"{schedule}, {lanes} lane{'s' * (lanes > 1)}", setup, state, dynamiq_hook))
    if options.json and rank == 0:
        print(json.dumps([row._asdict() | {"ratio": row.ratio} for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
