"""Time of an all-reduce by transport and schedule, beside the plain ones of torch.distributed and MPI.

    python packages/dynamiq-ddp/benchmarks/schedules.py [--ranks 4] [--megabytes 1 4 25] [--repeats 15] [--out FILE]

Starts its ranks itself, by torchrun for Gloo and by mpiexec for MPI. Every repeat times each schedule once, one after
the other, so that all of them see the same disturbances; a repeat takes as long as its slowest rank. Megabytes (10^6
bytes) are those of float32 gradients before compression. Prints the median and the quartiles in milliseconds, and what
``"auto"`` chooses. Processes on one machine share its cores: what this measures is mostly work, not a network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from time_to_accuracy.records import keep
from torch import Tensor

from dynamiq_core import Codec, DynamiQ
from dynamiq_ddp import all_reduce
from dynamiq_ddp.exact import Exact
from dynamiq_ddp.probe import bytes_of, known_link
from dynamiq_kernels import operations, warmup
from dynamiq_transport import Transport, choose, gather_records

SCHEDULES = ("ring", "butterfly", "direct", "hierarchical:2", "auto")
LAUNCHERS = {
    "gloo": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "mpi": [shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "mpiexec", "-n"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 25])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--transports", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS))
    parser.add_argument("--out", type=Path, help="file to which every row is added as a line of JSON")
    parser.add_argument("--inside", choices=list(LAUNCHERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        run_rank(options)
        return
    print(f"{options.ranks} ranks, {os.cpu_count()} cores; ms: median (quartiles) of {options.repeats}", flush=True)
    print("| transport | MB | all-reduce | ms |\n| --- | --- | --- | --- |", flush=True)
    for kind in options.transports:
        python = [] if kind == "gloo" else [sys.executable]
        words = [*LAUNCHERS[kind], str(options.ranks), *python, __file__, *sys.argv[1:], "--inside", kind]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(words, check=True, env=environment | os.environ)


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warmup(operations("numba", "cpu"))
    transport, plain, end = connect(options.inside)
    codec = DynamiQ(operations=operations("numba", "cpu"))
    for megabytes in options.megabytes:
        x = torch.randn(int(megabytes * 1e6) // 4, generator=torch.Generator().manual_seed(transport.rank))
        actions: dict[str, Callable[[Tensor], object]] = dict(plain)
        for schedule in SCHEDULES:
            actions[f"DynamiQ, {schedule}"] = compressed(transport, codec, schedule)
        actions["float32 through the engine, ring"] = compressed(transport, Exact(torch.float32), "ring")
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for repeat in range(options.repeats + 1):
            for name, action in actions.items():
                tensor = x.clone()
                meet(transport)
                started = time.perf_counter()
                action(tensor)
                own = int((time.perf_counter() - started) * 1e9)
                slowest = max(int(record) for record in gather_records(transport, str(own).encode(), 20))
                if repeat:  # the first one pays for connections and pages
                    seconds[name].append(slowest / 1e9)
        if transport.rank == 0:
            report(options, megabytes, seconds, transport, codec, x)
    end()


def compressed(transport: Transport, codec: Codec[object], schedule: str) -> Callable[[Tensor], object]:  # type: ignore[type-var]
    return lambda tensor: all_reduce(tensor, transport=transport, codec=codec, schedule=schedule, check=False)


def meet(transport: Transport) -> None:
    gather_records(transport, b"", 1)


def connect(kind: str) -> tuple[Transport, dict[str, Callable[[Tensor], object]], Callable[[], None]]:
    """The transport, the plain all-reduce of its library, and how to leave."""
    if kind == "gloo":
        import torch.distributed as dist

        from dynamiq_transport import TorchTransport

        dist.init_process_group("gloo")
        return TorchTransport.dedicated(), {"torch.distributed.all_reduce": dist.all_reduce}, dist.destroy_process_group
    from mpi4py import MPI

    from dynamiq_transport.mpi import MPITransport

    def sum_up(tensor: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM)

    return MPITransport(), {"MPI.Allreduce": sum_up}, lambda: None


def report(
    options: argparse.Namespace,
    megabytes: float,
    seconds: dict[str, list[float]],
    transport: Transport,
    codec: DynamiQ,
    x: Tensor,
) -> None:
    kind, link = options.inside, known_link(transport)
    for name, found in seconds.items():
        low, middle, high = (1e3 * float(q) for q in torch.tensor(found).quantile(torch.tensor([0.25, 0.5, 0.75])))
        chosen = ""
        if name.endswith("auto") and link is not None:
            chosen = choose(bytes_of(codec, x.numel(), x.device), transport.size, link).__name__
        shown = f"{name} ({chosen})" if chosen else name
        print(f"| {kind} | {megabytes:g} | {shown} | {middle:.1f} ({low:.1f} to {high:.1f}) |", flush=True)
        if options.out is not None:
            row = {"transport": kind, "megabytes": megabytes, "name": name, "chosen": chosen}
            keep(options.out, row, quartiles=[low, middle, high], ranks=transport.size, repeats=options.repeats)


if __name__ == "__main__":
    main()
