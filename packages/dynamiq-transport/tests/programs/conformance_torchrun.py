"""The conformance suite over Gloo between processes; pytest runs in every one that torchrun has started.

The ranks of each test are the last ones of the world, so the numbers inside the group are not the global ones, and
the processes outside it do not take part in making it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamiq_transport import TorchTransport, Transport
from dynamiq_transport.conformance import Conformance, all_to_all, several_per_peer

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GROUPS = {size: dist.new_group(list(range(SIZE - size, SIZE))) for size in range(1, SIZE + 1)}


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    GROUPS.clear()
    dist.destroy_process_group()


def run_processes(size: int, function: Callable[[Transport], Any], *, timeout: float) -> None:
    if SIZE - size <= RANK:
        with TorchTransport.dedicated(GROUPS[size], timeout=60.0) as transport:
            dist.barrier(group=GROUPS[size])  # nobody leaves, as some tests do, while others are still connecting
            transport.timeout = timeout  # of waits; making the group may take longer than a test wants to wait
            function(transport)


class TestProcesses(Conformance):
    launch = staticmethod(run_processes)
    sizes = (1, 3, 4)


def test_default_group_is_used_when_none_is_given() -> None:
    with TorchTransport(timeout=60.0) as transport:
        assert (transport.rank, transport.size) == (RANK, SIZE)
        all_to_all(transport, "cpu")


def test_ranks_are_those_of_the_registered_group() -> None:
    """On the group itself, not on one made from it."""
    if RANK == 0:
        with pytest.raises(TypeError, match="member"):
            TorchTransport(GROUPS[3])
        return
    with TorchTransport(GROUPS[3], timeout=60.0) as transport:
        assert (transport.rank, transport.size) == (RANK - 1, 3)
        all_to_all(transport, "cpu")


def test_groups_of_some_ranks_do_not_upset_those_of_all() -> None:
    """Torch names new groups by counters; a group that only some ranks make must leave them as they are."""
    for _ in range(3):
        if RANK > 0:
            with TorchTransport.dedicated(GROUPS[SIZE - 1], timeout=60.0) as transport:
                all_to_all(transport, "cpu")
        everybody = dist.new_group(list(range(SIZE)))
        total = torch.ones(1)
        dist.all_reduce(total, group=everybody)
        assert total.item() == SIZE
        dist.destroy_process_group(everybody)


def test_collective_of_the_user_stays_pending_across_our_messages() -> None:
    total = torch.full((100_000,), float(RANK))
    pending = dist.all_reduce(total, async_op=True)
    with TorchTransport.dedicated(timeout=60.0) as transport:
        several_per_peer(transport, "cpu")
    pending.wait()
    assert torch.equal(total, torch.full((100_000,), SIZE * (SIZE - 1) / 2))
