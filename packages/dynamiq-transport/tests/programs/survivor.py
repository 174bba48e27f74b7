"""A group of processes in which one rank, the victim, goes wrong; run by test_failures.py.

    survivor.py SIZE PORT FAULT PATTERN TIMEOUT

Torch is imported once and the ranks are forked from there. Each survivor prints one JSON line: what was raised, and
whether a second group could be made of the survivors with nothing left of the first one.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not listed in __all__

from dynamiq_transport import TorchTransport, Transport, TransportError

BYTES = 300_000
HEALTHY_STEPS = 3


def main() -> None:
    size, port = int(sys.argv[1]), int(sys.argv[2])
    fault, pattern, timeout = sys.argv[3], sys.argv[4], float(sys.argv[5])
    torch.set_num_threads(1)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run_rank(rank, size, port, fault, pattern, timeout)
            os._exit(0)
        children.append(child)
    victim = children.pop(size // 2)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    os.kill(victim, signal.SIGKILL)  # it may be stopped
    os.waitpid(victim, 0)
    sys.exit(any(statuses))


def run_rank(rank: int, size: int, port: int, fault: str, pattern: str, timeout: float) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    victim = size // 2

    use_group(store, "warm-up", rank, size, timeout=60.0)  # whatever torch sets up once per process
    before = resources()
    caught: TransportError | None = None
    started = time.monotonic()
    dist.init_process_group("gloo", store=PrefixStore("first", store), rank=rank, world_size=size)
    transport = TorchTransport.dedicated(timeout=timeout)
    try:
        for _ in range(HEALTHY_STEPS):
            exchange(transport, pattern, BYTES)
        started = time.monotonic()
        sent = BYTES
        if rank == victim:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "delay":
                time.sleep(3 * timeout)
            elif fault == "short":
                sent -= 1
            elif fault == "long":
                sent += 1_000_000
        exchange(transport, pattern, sent)
        exchange(transport, pattern, BYTES)
    except TransportError as error:
        caught = error
    result = {
        "error": type(caught).__name__,
        "message": str(caught),
        "peers": getattr(caught, "peers", ()),
        "seconds": time.monotonic() - started,
    }
    del caught
    transport.abort()
    dist.destroy_process_group()
    del transport
    gc.collect()
    result["left_behind"] = [after - had for after, had in zip(resources(), before, strict=True)]
    if rank != victim:
        result["rank"] = rank
        survivors = [other for other in range(size) if other != victim]
        use_group(store, "second", survivors.index(rank), size - 1, timeout=60.0)
        result["second_group"] = "works"
        # In one piece, since the ranks share the pipe, and on its own line, since the Gloo of torch 2.10 writes there.
        os.write(1, f"\n{json.dumps(result)}\n".encode())


def use_group(store: Store, name: str, rank: int, size: int, timeout: float) -> None:
    dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=size)
    with TorchTransport.dedicated(timeout=timeout) as transport:
        exchange(transport, "direct", BYTES)
    dist.destroy_process_group()


def exchange(transport: Transport, pattern: str, nbytes: int) -> None:
    """Send ``nbytes`` to every other rank or to the next one, and expect BYTES from there."""
    rank, size = transport.rank, transport.size
    if pattern == "direct":
        targets = sources = [peer for peer in range(size) if peer != rank]
    else:
        targets, sources = [(rank + 1) % size], [(rank - 1) % size]
    outgoing = torch.full((nbytes,), rank, dtype=torch.uint8)
    incoming = [(peer, torch.zeros(BYTES, dtype=torch.uint8)) for peer in sources]
    transport.exchange([(peer, outgoing) for peer in targets], incoming).wait()
    for peer, buffer in incoming:
        assert bool((buffer == peer).all()), f"rank {rank} took other bytes for those of rank {peer}"


def resources() -> tuple[int, int]:
    """Open files and sockets, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
