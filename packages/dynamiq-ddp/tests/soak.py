"""Many all-reduces in a row: right every time, with the same bits on all ranks, and nothing that piles up.

    python packages/dynamiq-ddp/tests/soak.py 2000

Four ranks as threads over Gloo do all-reduces of random sizes, dtypes, schedules and codecs. The error of each is held
against what its codec expects. After a warm-up the resident memory, the Python objects and the living tensors have to
stay what they were, and in the end no thread, file or socket may be left. Prints what it has found as one JSON object.
The draws are seeded, and so are the results; only memory depends on the machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq_core import Codec, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import all_reduce
from dynamiq_ddp.route import NodeRoute, find_route
from dynamiq_kernels import operations, warmup
from dynamiq_transport import TorchTransport, Transport

RANKS = 4
LARGEST = 200_000
WARM_UP = 60
MEGABYTE = 1 << 20
GROWTH = 4.0
"""MB of resident memory that may be added after the warm-up. In runs of 2,000 and 2,500 all-reduces 1.3 and 0.7
were measured; a leak of 20 kB in each, of some 1 MB that one of them handles, would be seen after 200."""

SCHEDULES = ("ring", "butterfly", "direct", "hierarchical:2", "hierarchical:4", "hierarchical:2:direct")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


class Draw(NamedTuple):
    """One all-reduce."""

    step: int
    rows: Tensor
    schedule: str
    codec: Codec[Any]


def draw(step: int, codecs: tuple[Codec[Any], ...]) -> Draw:
    generator = torch.Generator().manual_seed(step)

    def pick(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    size = float(torch.rand((), generator=generator))
    numel = LARGEST if step < WARM_UP // 2 else int(LARGEST**size)  # the warm-up meets the largest buffers
    scale = 10.0 ** float(6 * torch.rand((), generator=generator) - 4)
    rows = scale * (torch.randn(numel, generator=generator) + torch.randn(RANKS, numel, generator=generator))
    return Draw(step, rows.to(pick(tuple(ROUNDING))), pick(SCHEDULES), pick(codecs))


def bound(case: Draw) -> float:
    """How far the mean may be from the exact one, in Euclidean norm: what the codec expects, and a margin."""
    norms = float(case.rows.double().norm(dim=1).sum()) / RANKS
    rounding = ROUNDING[case.rows.dtype] * norms
    if isinstance(case.codec, BF16):
        return RANKS * 2.0**-9 * norms + rounding
    route, rows, parts = find_route(case.schedule, 0, RANKS), case.rows, 1
    if isinstance(route, NodeRoute):
        parts = route.inside.schedule.size
        rows, route = rows.float().view(-1, parts, rows.shape[1]).mean(dim=1), route.between
    assert not isinstance(route, NodeRoute)
    expected = 0.0
    for part in torch.tensor_split(rows, parts, dim=1):
        if len(part) > 1 and part.shape[1]:
            merged = case.codec.merge_statistics([case.codec.statistics(row.contiguous()) for row in part])
            plan = case.codec.plan(
                merged,
                part.shape[1],
                device=part.device,
                workers=len(part),
                chunks=route.schedule.chunks,
                gain=route.gain,
            )
            expected += float(plan.expected_error) / len(part) ** 2
    return 4 * expected**0.5 + rounding + 2.0**-22 * norms


def resources() -> tuple[int, int]:
    """Open files and sockets, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Memory(NamedTuple):
    """MB that are in use, and how many tensors are alive."""

    resident: float
    tensors: int


def memory() -> Memory:
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # what the allocator keeps for itself is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    return Memory(pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE, tensors)


def open_transport(store: dist.Store, rank: int) -> Transport:
    group = dist.ProcessGroup(store, rank, RANKS)
    backend = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return TorchTransport.dedicated(group, timeout=60.0)


def soak(count: int) -> dict[str, Any]:
    """Do that many all-reduces after the warm-up.

    Raises:
        AssertionError: one of them was wrong, or something is left.
    """
    codecs: tuple[Codec[Any], ...] = (DynamiQ(operations=operations("numba", "cpu")), BF16())
    warmup(operations("numba", "cpu"))
    before = resources()
    with ThreadPoolExecutor(RANKS) as pool:
        transports = list(pool.map(partial(open_transport, dist.HashStore()), range(RANKS)))

        def one(case: Draw) -> float:
            def work(rank: int) -> Tensor:
                tensor = case.rows[rank].clone()
                return all_reduce(
                    tensor, transport=transports[rank], codec=case.codec, schedule=case.schedule, step=case.step
                )

            means = list(pool.map(work, range(RANKS)))
            assert all(torch.equal(mean, means[0]) for mean in means), f"ranks differ in {case.step}"
            error = float((means[0].double() - case.rows.double().mean(dim=0)).norm())
            allowed = bound(case)
            assert error <= allowed, f"{case.step}: error {error} above {allowed}; {case.schedule}, {case.codec}"
            return error / allowed

        for step in range(WARM_UP):
            one(draw(step, codecs))
        first, started = memory(), time.perf_counter()
        worst = max(one(draw(step, codecs)) for step in range(WARM_UP, WARM_UP + count))
        seconds, last = time.perf_counter() - started, memory()
        for transport in transports:
            transport.close()
        transports.clear()
    gc.collect()
    deadline = time.monotonic() + 10.0
    while resources() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the system takes a moment to bury a thread that has been joined
    after = resources()
    found = {
        "all_reduces": count,
        "seconds": seconds,
        "largest_error_of_what_is_allowed": worst,
        "resident_growth_mb": last.resident - first.resident,
        "more_tensors": last.tensors - first.tensors,
        "left_behind": [now - had for now, had in zip(after, before, strict=True)],
    }
    assert found["left_behind"] == [0, 0], found
    assert found["more_tensors"] == 0, found
    assert last.resident - first.resident < GROWTH, found
    return found


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    print(json.dumps(soak(int(sys.argv[1]))))
