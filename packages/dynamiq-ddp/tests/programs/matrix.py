"""Every schedule on groups of 1 to 8 ranks, over MPI or over Gloo between processes; see test_matrix.py.

    mpiexec -n 8 python matrix.py mpi
    torchrun --nproc-per-node 8 matrix.py gloo

The eight ranks are divided into groups in several ways, in which all of them work at the same time. Every rank prints
one JSON object with the digests of what its all-reduces came to.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable

import torch

from dynamiq_core import DynamiQ
from dynamiq_ddp import all_reduce
from dynamiq_ddp.probe import bytes_of, known_link
from dynamiq_transport import Transport, choose

NUMEL = 1501
DIVISIONS = ((8,), (5, 3), (6, 2), (4, 3, 1))
TIMEOUT = 120.0


def schedules(size: int) -> list[str]:
    """All but ``"auto"``, which is one of them."""
    nodes = [f"hierarchical:{m}:butterfly" for m in range(1, size + 1) if size % m == 0]
    return ["ring", "butterfly", "direct", *nodes]


def row(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest()


def digests(transport: Transport) -> dict[str, str]:
    """By schedule; for ``"auto"`` also which one it has chosen."""
    found = {}
    for schedule in [*schedules(transport.size), "auto"]:
        tensor, codec = row(transport.rank), DynamiQ()
        all_reduce(tensor, transport=transport, codec=codec, schedule=schedule)
        name = schedule
        if schedule == "auto":
            link = known_link(transport)
            assert link is not None
            name = f"auto {choose(bytes_of(codec, NUMEL, tensor.device), transport.size, link).__name__}"
        found[name] = digest(tensor)
    return found


def place(rank: int, division: tuple[int, ...]) -> tuple[int, int]:
    """Which group of a division a rank belongs to, and the first rank of that group."""
    first = 0
    for group, size in enumerate(division):
        if rank < first + size:
            return group, first
        first += size
    raise AssertionError(f"rank {rank} has no place in {division}")


def run(rank: int, join: Callable[[tuple[int, ...]], Transport]) -> None:
    for division in DIVISIONS:
        with join(division) as transport:
            _, first = place(rank, division)
            assert transport.rank == rank - first
            result = {"size": transport.size, "rank": transport.rank, "digests": digests(transport)}
        # In one piece, since the ranks share the pipe, and on a line that Gloo has not begun.
        os.write(1, f"\n{json.dumps(result)}\n".encode())


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "mpi":
        from mpi4py import MPI

        from dynamiq_transport.mpi import MPITransport

        world = MPI.COMM_WORLD
        run(
            world.rank,
            lambda division: MPITransport(world.Split(place(world.rank, division)[0], world.rank), timeout=TIMEOUT),
        )
    else:
        import torch.distributed as dist

        from dynamiq_transport import TorchTransport

        dist.init_process_group("gloo")

        def join(division: tuple[int, ...]) -> Transport:
            groups, first = [], 0
            for size in division:
                groups.append(dist.new_group(list(range(first, first + size))))
                first += size
            group, _ = place(dist.get_rank(), division)
            return TorchTransport.dedicated(groups[group], timeout=TIMEOUT)

        run(dist.get_rank(), join)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
