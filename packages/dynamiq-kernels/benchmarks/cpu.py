"""Time of the codec's operations on this CPU, as ratios to ``torch.add`` on as many coordinates in the same run.

    python packages/dynamiq-kernels/benchmarks/cpu.py [--bits 5] [--exponent 24] [--rounds 9] [--backend auto]
                                                      [--assembly] [--json]

The yardstick ``torch.add(a, b, out=c)`` and an operation take turns, and each ratio is that of the medians, so that a
machine whose speed drifts slows both. Both use the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, Received
from dynamiq_kernels import operations, warmup

WORKERS = 4
CHUNKS = 1  # the whole tensor is one chunk, so that an operation touches each coordinate once


def jobs(codec: DynamiQ, numel: int) -> dict[str, Callable[[], object]]:
    """The operations on ``numel`` coordinates, ready to be called again and again."""
    generator = torch.Generator().manual_seed(0)
    loudness = torch.exp(torch.randn(-(-numel // 256), generator=generator)).repeat_interleave(256)[:numel]
    x = torch.randn(numel, generator=generator) * loudness
    rows = codec.merge_statistics([codec.statistics(x)] * WORKERS)

    def make_plan() -> DynamiQPlan:
        return codec.plan(rows, numel, device=x.device, workers=WORKERS, chunks=CHUNKS)

    plan = make_plan()
    first = codec.compress(x, plan, chunk=0, slot=0)
    out, mean = torch.empty_like(first), torch.empty_like(x)
    received = [Received(first, 0)]
    return {
        "hop": lambda: codec.decompress_accumulate_recompress(received, x, plan, chunk=0, slot=1, out=out),
        "compress": lambda: codec.compress(x, plan, chunk=0, slot=0, out=out),
        "finish": lambda: codec.decompress(first, plan, chunk=0, slot=0, out=mean),
        "statistics": lambda: codec.statistics(x),
        "plan": make_plan,
    }


def seconds(job: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def instruction_set() -> str:
    """What LLVM compiles for on this machine."""
    try:
        from llvmlite import binding
    except ImportError:
        return "no LLVM: Numba is not installed"
    vectors = ("avx512f", "avx2", "avx", "sse4.2", "sve", "neon")
    features = binding.get_host_cpu_features()
    return f"{binding.get_host_cpu_name()} with {', '.join(name for name in vectors if features.get(name)) or 'none'}"


def vector_instructions(kernel: Any) -> dict[str, int]:
    """Instructions of a Numba kernel by the widest x86 register they touch, ``zmm`` having 512 bits.

    It is compiled once more, as what comes from the disk has no assembly to look at.
    """
    from numba import njit

    fresh: Any = njit(nogil=True, error_model="numpy")(kernel.py_func)
    fresh.compile(kernel.nopython_signatures[0].args)
    (assembly,) = fresh.inspect_asm().values()
    instructions = re.findall(r"^\t[a-z].*$", assembly, re.MULTILINE)
    widest = [next((kind for kind in ("zmm", "ymm", "xmm") if kind in line), "none") for line in instructions]
    return dict(Counter(widest))


def main() -> None:
    """Measure, print a table, and with ``--json`` the ratios as a last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--exponent", type=int, default=24, help="2 to which number of coordinates")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--assembly", action="store_true", help="count the vector instructions of Numba's kernels")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    numel = 2**options.exponent
    config = CodecConfig(bits=options.bits)
    chosen = operations(options.backend, "cpu")
    warmup(chosen, config=config)
    codec = DynamiQ(config, operations=chosen)
    a, b, c = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    print(f"backend {chosen.name}, {numel:,} float32 coordinates at {options.bits:g} bits; {instruction_set()}")
    print(f"{'operation':<12} {'threads':>7} {'ns/coordinate':>14} {'torch.add':>10} {'ratio':>7}")

    ratios: dict[str, float] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, job in jobs(codec, numel).items():
            job()
            torch.add(a, b, out=c)
            pairs = [(seconds(job), seconds(lambda: torch.add(a, b, out=c))) for _ in range(options.rounds)]
            took, yardstick = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios[f"{name}_{threads}"] = round(took / yardstick, 3)
            per_coordinate = (1e9 * took / numel, 1e9 * yardstick / numel)
            print(
                f"{name:<12} {threads:>7} {per_coordinate[0]:>14.2f} {per_coordinate[1]:>10.2f}"
                f" {took / yardstick:>6.2f}x"
            )
    if options.assembly and chosen.name == "numba":
        for name in ("hop", "finish", "statistics"):
            kernel = getattr(sys.modules[f"dynamiq_kernels.numba.{name}"], f"_{name}")
            print(f"instructions of {name} by widest register: {vector_instructions(kernel)}")
    if options.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
