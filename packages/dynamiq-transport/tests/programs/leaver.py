"""Ranks that leave right after their last message, some of them without having waited; see test_processes.py.

    leaver.py SIZE PORT REPEATS

Ends with status 0 when no rank has seen an error.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not listed in __all__

from dynamiq_transport import TorchTransport


def run_rank(rank: int, size: int, port: int, repeat: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=PrefixStore(str(repeat), store), rank=rank, world_size=size)
    after, before = (rank + 1) % size, (rank - 1) % size
    found = torch.zeros(200_000, dtype=torch.uint8)
    with TorchTransport.dedicated(timeout=60.0) as transport:
        transport.exchange([(after, torch.full_like(found, rank))], [])  # nobody waits for it
        transport.exchange([], [(before, found)]).wait()
    assert bool((found == before).all())
    sys.stdout.flush()
    os._exit(0)  # without destroying the group


def main() -> None:
    size, port, repeats = (int(word) for word in sys.argv[1:])
    torch.set_num_threads(1)
    for repeat in range(repeats):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                run_rank(rank, size, port, repeat)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(f"a rank failed in repeat {repeat}")


if __name__ == "__main__":
    main()
