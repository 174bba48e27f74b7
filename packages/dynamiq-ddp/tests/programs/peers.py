"""Training with the hook, in which one rank goes wrong in the middle of a backward pass; see test_peers.py.

    peers.py PORT TIMEOUT REPEATS

Torch is imported once. For every fault a group of ranks is forked, all of them at the same time, and each survivor
prints one JSON object: what was raised, and whether it could go on in a group of the survivors with nothing left of the
first one. Before that, REPEATS groups make one backward pass and leave at once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch._dynamo  # which DDP imports when it is made; here it is imported once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import DynamiQError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, dynamiq_hook
from dynamiq_ddp.frames import HEADER
from dynamiq_transport import Handle, Message, TorchTransport, Transport

FAULTS = ("kill", "stop", "late", "short", "header")
SIZE = 3
VICTIM = 1
FAULTY_STEP = 2
WIDTH = 64


class Lying(Transport):
    """Over another transport, sends what it should not while it is told to.

    Attributes:
        fault: "short", "header", or nothing.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self.fault = transport.rank, transport.size, ""
        self._transport = transport

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        changed = [(peer, tensor.clone()) for peer, tensor in sends]
        if self.fault == "short":
            changed = [(peer, tensor[:-1]) for peer, tensor in changed]
        elif self.fault == "header":
            for _, tensor in changed:
                if tensor.numel() > HEADER:  # a frame, and no token of the first bucket, which may be late
                    tensor[12] += 1  # the step
        return self._transport.exchange(changed, recvs)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def model() -> nn.Module:
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for parameter in layers.parameters():
        nn.init.ones_(parameter)
    return layers


def wrap(state: DynamiQState) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)  # a bucket for every layer
    ddp.register_comm_hook(state, dynamiq_hook)
    return ddp


def make_state(timeout: float, **arguments: object) -> DynamiQState:
    return DynamiQState(codec=BF16(), min_compress_numel=0, schedule="direct", timeout=timeout, **arguments)  # type: ignore[arg-type]


def backward(ddp: DistributedDataParallel, value: float) -> None:
    ddp.zero_grad()
    ddp(torch.full((1, WIDTH), value)).sum().backward()


def connect(store: dist.Store, name: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def whole_life(store: dist.Store, name: str, rank: int, size: int) -> bool:
    """A group, a model, a backward pass, and the end of them; whether the gradient is the mean."""
    connect(store, name, rank, size)
    state = make_state(60.0)
    ddp = wrap(state)
    backward(ddp, rank + 1.0)
    bias = ddp.module[-1].bias.grad
    state.close()
    del ddp
    dist.destroy_process_group()
    return bool((bias == 1.0).all())


def resources() -> tuple[int, int]:
    """Open files and sockets, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(enough: Callable[[tuple[int, int], tuple[int, int]], bool]) -> tuple[int, int]:
    """What is open once ``enough(now, a moment ago)``: the system takes its time to bury threads and sockets."""
    gc.collect()
    deadline, now = time.monotonic() + 10.0, resources()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        had, now = now, resources()
        if enough(now, had):
            break
    return now


def run_rank(rank: int, port: int, timeout: float, fault: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store = dist.PrefixStore(fault, store)
    whole_life(store, "warm-up", rank, SIZE)  # whatever torch sets up once per process
    before = settled(lambda now, had: now == had)
    connect(store, "first", rank, SIZE)
    lanes: list[Lying] = []

    def lying() -> Transport:
        lanes.append(Lying(TorchTransport.dedicated(timeout=timeout)))
        return lanes[-1]

    state = make_state(timeout, **({"transport": lying} if rank == VICTIM else {}))
    ddp = wrap(state)
    for _ in range(FAULTY_STEP):
        backward(ddp, rank + 1.0)

    def go_wrong(grad: torch.Tensor) -> None:
        """When the last two of four layers have been handed over."""
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "late":
            time.sleep(2.5 * timeout)
        for lane in lanes:
            lane.fault = fault

    if rank == VICTIM:
        inner = ddp.module
        inner[1].register_full_backward_hook(lambda module, into, out: go_wrong(out[0]))
    caught, started = None, time.monotonic()
    try:
        backward(ddp, rank + 1.0)
    except DynamiQError as error:
        caught, seconds = error, time.monotonic() - started
        result = {
            "fault": fault,
            "rank": rank,
            "error": type(error).__name__,
            "message": str(error),
            "peers": getattr(error, "peers", ()),
            "step": getattr(error, "step", None),
            "bucket": getattr(error, "bucket", None),
            "seconds": seconds,
        }
    if rank == VICTIM:
        return
    assert caught is not None, f"{fault}: rank {rank} saw nothing"
    del caught
    state.close()
    del ddp, state
    dist.destroy_process_group()
    after = settled(lambda now, had: now == before)
    result["left_behind"] = [now - had for now, had in zip(after, before, strict=True)]
    survivors = [other for other in range(SIZE) if other != VICTIM]
    result["goes_on"] = whole_life(store, "second", survivors.index(rank), len(survivors))
    # In one piece, since the ranks share the pipe, and on a line that Gloo has not begun.
    os.write(1, f"\n{json.dumps(result)}\n".encode())


def leave(rank: int, port: int, name: str) -> None:
    """One backward pass, and the end, with nothing closed or destroyed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    connect(store, name, rank, SIZE)
    ddp = wrap(make_state(60.0))
    backward(ddp, rank + 1.0)
    assert bool((ddp.module[-1].bias.grad == 1.0).all())
    sys.stdout.flush()
    os._exit(0)


def fork(function: object, *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*arguments)  # type: ignore[operator]
            status = 0
        except BaseException as error:
            os.write(2, f"{arguments}: {error!r}\n".encode())
        os._exit(status)
    return child


def main() -> None:
    port, timeout, repeats = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for repeat in range(repeats):
        children = [fork(leave, rank, port, f"leave {repeat}") for rank in range(SIZE)]
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(f"a rank that left at once did harm in repeat {repeat}")
    groups = [[fork(run_rank, rank, port, timeout, fault) for rank in range(SIZE)] for fault in FAULTS]
    victims = [group.pop(VICTIM) for group in groups]
    statuses = [os.waitpid(child, 0)[1] for group in groups for child in group]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)  # it may be stopped
        os.waitpid(victim, 0)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
