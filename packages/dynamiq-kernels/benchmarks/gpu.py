"""What the Triton kernels do on a GPU: equality, an all-reduce without a host read, a graph, and GB/s.

    python packages/dynamiq-kernels/benchmarks/gpu.py            on a GPU, under three minutes
    python packages/dynamiq-kernels/benchmarks/gpu.py --interpret    a small size through the interpreter, without one

Bandwidths count the bytes that an operation has to move: the gradient in its own dtype, messages at their bits, means
and plan. They stand beside a device-to-device copy of the same run, and so does their share of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, Received, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (2.0, 4.0, 5.0, 8.0)
WORKERS = 4
BUCKET = 25 * 2**18
"""float32 coordinates of a bucket of DDP, unless one is told otherwise."""


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: torch.device
    numel: int
    repetitions: int

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def gradient(numel: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient whose super-groups differ in magnitude, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = -(-numel // 256)
    scale = torch.exp(1.5 * torch.randn(rows, 1, generator=generator, device=device))
    x = torch.randn(rows, 256, generator=generator, device=device)
    return x.mul_(scale).flatten()[:numel].to(dtype)


def ring(codec: DynamiQ, xs: list[Tensor], plan: DynamiQPlan) -> list[Tensor]:
    """The final messages of an all-reduce of in-process ranks: chunk c starts at rank c + 1 and ends at rank c."""
    finals = []
    for chunk in range(WORKERS):
        received: list[Received] = []
        for hop in range(1, WORKERS + 1):
            rank = (chunk + hop) % WORKERS
            message = codec.decompress_accumulate_recompress(received, xs[rank], plan, chunk=chunk, slot=rank)
            received = [Received(message, rank)]
        finals.append(message)
    return finals


def all_reduce(codec: DynamiQ, xs: list[Tensor], out: Tensor) -> list[Tensor]:
    """Statistics, plan, hops and finish of all ranks; returns the messages, the mean is in ``out``."""
    numel, device = xs[0].numel(), xs[0].device
    merged = codec.merge_statistics([codec.statistics(x) for x in xs])
    plan = codec.plan(merged, numel, device=device, workers=WORKERS, chunks=WORKERS, step=3, bucket=1)
    messages = ring(codec, xs, plan)
    for chunk, message in enumerate(messages):
        codec.decompress(message, plan, chunk=chunk, slot=chunk, out=out)
    return messages


def check_equality(operations: Any, setting: Setting) -> None:
    """An all-reduce on the device and with the reference on the CPU, for dtypes, odd sizes and configurations."""
    configs = (CodecConfig(), CodecConfig.paper(), CodecConfig(bits=3.7, rounding="independent"))
    sizes = (300,) if setting.device.type == "cpu" else (1, 257, 4096, 70_001)
    for config in configs:
        for dtype in DTYPES:
            for numel in sizes:
                xs = [gradient(numel, seed, dtype, torch.device("cpu")) for seed in range(WORKERS)]
                expected = torch.full_like(xs[0], torch.nan)
                messages = all_reduce(DynamiQ(config), xs, expected)
                got = torch.full_like(expected, torch.nan, device=setting.device)
                there = all_reduce(DynamiQ(config, operations=operations), [x.to(setting.device) for x in xs], got)
                same = all(torch.equal(a.cpu(), b) for a, b in zip(there, messages, strict=True))
                if not same or not torch.equal(got.cpu(), expected):
                    sys.exit(f"NOT EQUAL: {numel} coordinates of {dtype}, {config}")
    print("equality: messages and means are bit-equal to the reference")


def check_no_host_read(operations: Any, setting: Setting) -> None:
    """A whole all-reduce while every synchronisation with the host is an error."""
    codec = DynamiQ(CodecConfig(), operations=operations)
    xs = [gradient(10**6 + 1, seed, torch.bfloat16, setting.device) for seed in range(WORKERS)]
    out = torch.empty_like(xs[0])
    all_reduce(codec, xs, out)  # compile, and put tables on the device
    setting.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_reduce(codec, xs, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print("host reads: none in statistics, plan, hops and finish")


def check_graph(operations: Any, setting: Setting) -> None:
    """The hop captured in a CUDA graph gives the same bytes when it is replayed on another gradient."""
    codec = DynamiQ(CodecConfig(), operations=operations)
    xs = [gradient(10**6, seed, torch.bfloat16, setting.device) for seed in range(3)]
    rows = codec.merge_statistics([codec.statistics(x) for x in xs])
    plan = codec.plan(rows, 10**6, device=setting.device, workers=3, chunks=1)
    received = [Received(codec.compress(xs[0], plan, chunk=0, slot=0), 0)]
    x, hop = xs[1].clone(), partial(codec.decompress_accumulate_recompress, chunk=0, slot=1)
    out = hop(received, x, plan)
    setting.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hop(received, x, plan, out=out)
    x.copy_(xs[2])
    graph.replay()
    expected = hop(received, xs[2], plan)
    if not torch.equal(out, expected):
        sys.exit("NOT EQUAL: the hop replayed from a CUDA graph")
    print("CUDA graph: the captured hop gives the same bytes")


def seconds(call: Callable[[], object], setting: Setting) -> float:
    """Median time of a call."""
    call()
    setting.synchronize()
    times: list[float] = []
    for _ in range(setting.repetitions):
        if setting.device.type == "cuda":
            start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            setting.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_time(setting: Setting) -> float:
    """Median time of copying float32 coordinates."""
    source = torch.empty(setting.numel, device=setting.device)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), setting)


def calls(codec: DynamiQ, x: Tensor, total: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """The operations of one configuration, each with the bytes that it has to move."""
    plan = codec.plan(codec.statistics(x), x.numel(), device=x.device, workers=2, chunks=1)
    first = codec.compress(x, plan, chunk=0, slot=0)
    out, mean = torch.empty_like(first), torch.empty_like(x)
    own, size, sums = x.numel() * x.element_size(), first.numel(), 8 * x.numel()
    table = 16 * plan.index.numel()  # index, width, offset and mean of every super-group
    received = [Received(first, 0)]

    def hop() -> object:
        return codec.decompress_accumulate_recompress(received, x, plan, chunk=0, slot=1, out=out)

    def compress() -> object:
        return codec.compress(x, plan, chunk=0, slot=1, out=out)

    def accumulate() -> object:
        return codec.decompress_accumulate(first, total, plan, chunk=0, slot=0)

    def finish() -> object:
        return codec.decompress(first, plan, chunk=0, slot=0, out=mean)

    return {
        "hop": (hop, own + 2 * size + table),
        "compress": (compress, own + size + table),
        "accumulate": (accumulate, sums + size + table),
        "finish": (finish, own + size + table),
    }


def plans(operations: Any, setting: Setting) -> Iterator[dict[str, Any]]:
    """Seconds and bytes of a plan, by kernels and by torch's operations, for a bucket of DDP and a large tensor."""
    for numel in sorted({min(BUCKET, setting.numel), setting.numel}):
        x = gradient(numel, 0, torch.bfloat16, setting.device)
        statistics = operations.statistics(x)
        moved = len(statistics) * (4 + 4 + 16 + 8 + 8)  # statistics, means, rows, energies and errors
        for name, backend in (("plan", operations), ("torch plan", reference)):
            codec = DynamiQ(CodecConfig(), operations=backend)
            call = partial(codec.plan, statistics, numel, device=x.device, workers=WORKERS, chunks=WORKERS)
            yield {"operation": name, "numel": numel, "seconds": seconds(call, setting), "bytes": moved}


def measurements(operations: Any, setting: Setting) -> Iterator[dict[str, Any]]:
    """Seconds and bytes of every operation for every dtype and budget, the copy and the plan first."""
    numel, device = setting.numel, setting.device
    yield {"operation": "copy", "seconds": copy_time(setting), "bytes": 8 * numel}
    yield from plans(operations, setting)
    total = torch.zeros(numel, device=device)
    for dtype in DTYPES:
        x = gradient(numel, 0, dtype, device)
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        time_taken = seconds(partial(operations.statistics, x), setting)
        moved = x.numel() * x.element_size() + 4 * -(-numel // 256)
        yield row | {"operation": "statistics", "seconds": time_taken, "bytes": moved}
        for bits in BITS:
            codec = DynamiQ(CodecConfig(bits=bits), operations=operations)
            for operation, (call, moved) in calls(codec, x, total).items():
                yield row | {"bits": bits, "operation": operation, "seconds": seconds(call, setting), "bytes": moved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**28, help="coordinates (2**28)")
    parser.add_argument(
        "--interpret", action="store_true", help="a small size through Triton's interpreter, on the CPU"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object of all figures")
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    if not arguments.interpret and not torch.cuda.is_available():
        sys.exit("no GPU: --interpret runs a small size through Triton's interpreter")
    from dynamiq_kernels import triton as operations

    device = torch.device("cpu" if arguments.interpret else "cuda")
    setting = Setting(device, 1024 if arguments.interpret else arguments.numel, 1 if arguments.interpret else 10)
    where = "Triton's interpreter" if arguments.interpret else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, {setting.numel} coordinates")
    check_equality(operations, setting)
    if device.type == "cuda":
        check_no_host_read(operations, setting)
        check_graph(operations, setting)
    print(f"{'operation':12}{'dtype':10}{'bits':>5}{'ms':>10}{'GB/s':>9}{'of copy':>9}{'Gcoord/s':>10}")
    figures, copy = [], 1.0
    for row in measurements(operations, setting):
        rate = row["bytes"] / row["seconds"] / 1e9
        copy = rate if row["operation"] == "copy" else copy
        figures.append(row | {"gigabytes_per_second": rate, "of_copy": rate / copy})
        print(
            f"{row['operation']:12}{row.get('dtype', 'float32'):10}{row.get('bits', ''):>5}{row['seconds'] * 1e3:10.3f}"
            f"{rate:9.1f}{rate / copy:9.2f}{row.get('numel', setting.numel) / row['seconds'] / 1e9:10.2f}",
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"where": where, "numel": setting.numel, "rows": figures}))


if __name__ == "__main__":
    main()
