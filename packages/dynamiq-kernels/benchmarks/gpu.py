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
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--numel", type=int, default=2**28, help="coordinates (2**28)")
parser.add_argument("--interpret", action="store_true", help="a small size through Triton's interpreter, on the CPU")
parser.add_argument("--json", action="store_true", help="end with one JSON object of all figures")

if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, Received
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (2.0, 4.0, 5.0, 8.0)
WORKERS = 4


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
    x, place = xs[1].clone(), {"chunk": 0, "slot": 1}
    out = codec.decompress_accumulate_recompress(received, x, plan, **place)
    setting.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.decompress_accumulate_recompress(received, x, plan, out=out, **place)
    x.copy_(xs[2])
    graph.replay()
    expected = codec.decompress_accumulate_recompress(received, xs[2], plan, **place)
    if not torch.equal(out, expected):
        sys.exit("NOT EQUAL: the hop replayed from a CUDA graph")
    print("CUDA graph: the captured hop gives the same bytes")


def seconds(call: Callable[[], object], setting: Setting) -> float:
    """Median time of a call."""
    call()
    setting.synchronize()
    times = []
    for _ in range(setting.repetitions):
        if setting.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def measurements(operations: Any, setting: Setting) -> Iterator[dict[str, Any]]:
    """Seconds and bytes of every operation for every dtype and budget, the copy first."""
    numel, device = setting.numel, setting.device
    source = torch.empty(numel, device=device)
    target = torch.empty_like(source)
    yield {"operation": "copy", "seconds": seconds(lambda: target.copy_(source), setting), "bytes": 8 * numel}
    del source, target
    rows = -(-numel // 256)
    table = 16 * rows  # index, width, offset and mean of every super-group
    for dtype in DTYPES:
        x = gradient(numel, 0, dtype, device)
        own = x.numel() * x.element_size()
        total = torch.zeros(numel, device=device)
        codec = DynamiQ(operations=operations)
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        yield row | {
            "operation": "statistics", "seconds": seconds(lambda: codec.statistics(x), setting), "bytes": own + 4 * rows,
        }  # fmt: skip
        for bits in BITS:
            config = CodecConfig(bits=bits)
            codec = DynamiQ(config, operations=operations)
            statistics_rows = codec.statistics(x)
            plan = codec.plan(statistics_rows, numel, device=device, workers=2, chunks=1)
            first = codec.compress(x, plan, chunk=0, slot=0)
            out, mean = torch.empty_like(first), torch.empty_like(x)
            size, received, place = first.numel(), [Received(first, 0)], {"chunk": 0, "slot": 1}
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "hop": (
                    lambda: codec.decompress_accumulate_recompress(received, x, plan, out=out, **place),
                    own + 2 * size + table,
                ),
                "compress": (lambda: codec.compress(x, plan, out=out, **place), own + size + table),
                "accumulate": (
                    lambda: codec.decompress_accumulate(first, total, plan, chunk=0, slot=0), 8 * numel + size + table
                ),
                "finish": (
                    lambda: codec.decompress(first, plan, chunk=0, slot=0, out=mean), own + size + table
                ),
            }  # fmt: skip
            for operation, (call, moved) in calls.items():
                yield row | {
                    "bits": bits, "operation": operation, "seconds": seconds(call, setting), "bytes": moved,
                }  # fmt: skip


def main() -> None:
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
            f"{rate:9.1f}{rate / copy:9.2f}{setting.numel / row['seconds'] / 1e9:10.2f}",
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"where": where, "numel": setting.numel, "rows": figures}))


if __name__ == "__main__":
    main()
