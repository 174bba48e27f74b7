"""Transports over some of the ranks of another one, and the two levels of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamiq_transport import SubTransport, Transport, TransportError, levels, run_local
from dynamiq_transport.conformance import Conformance, all_to_all, several_per_peer


def run_part(size: int, function: Callable[[Transport], Any], *, timeout: float) -> None:
    """The function runs on the odd ranks of a group twice as large, in descending order."""
    ranks = list(range(2 * size - 1, 0, -2))

    def work(whole: Transport) -> None:
        if whole.rank in ranks:
            with SubTransport(whole, ranks) as part:
                assert part.rank == ranks.index(whole.rank)
                function(part)

    run_local(2 * size, work, timeout=timeout)


class TestSubTransport(Conformance):
    launch = staticmethod(run_part)
    sizes = (1, 2, 3, 5)


@pytest.mark.parametrize(("size", "node_size"), [(1, 1), (4, 2), (6, 3), (6, 1), (6, 6), (12, 4)])
def test_levels_are_two_partitions_that_meet_in_one_rank(size: int, node_size: int) -> None:
    every = [levels(rank, size, node_size) for rank in range(size)]
    for rank, (inner, outer) in enumerate(every):
        assert (len(inner), len(outer)) == (node_size, size // node_size)
        assert set(inner) & set(outer) == {rank}
        assert all(every[other].inner == inner for other in inner)
        assert all(every[other].outer == outer for other in outer)
        assert max(inner) - min(inner) == node_size - 1


@pytest.mark.parametrize("node_size", [0, -1, 4, 5, 7])
def test_nodes_of_different_size_are_refused(node_size: int) -> None:
    with pytest.raises(ValueError, match=rf"node_size cannot be {node_size} with 6 ranks; allowed: 1, 2, 3, 6"):
        levels(0, 6, node_size)


def test_both_levels_in_use_at_once() -> None:
    """Reduce inside, sum outside, gather inside, all over one transport."""

    def work(whole: Transport) -> None:
        inner, outer = (SubTransport(whole, ranks) for ranks in levels(whole.rank, whole.size, 2))
        several_per_peer(inner, "cpu")
        all_to_all(outer, "cpu")
        a, b = torch.zeros(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
        mine = torch.full((9,), whole.rank, dtype=torch.uint8)
        first = inner.exchange([(1 - inner.rank, mine)], [(1 - inner.rank, a)])
        second = outer.exchange([((outer.rank + 1) % 3, mine)], [((outer.rank - 1) % 3, b)])
        second.wait()
        first.wait()
        assert a[0] == whole.rank ^ 1
        assert b[0] == (whole.rank - 2) % 6

    run_local(6, work, timeout=30.0)


@pytest.mark.parametrize(("ranks", "complaint"), [([0, 0], "different"), ([0, 3], "allowed"), ([1, 2], "lack rank 0")])
def test_bad_ranks(ranks: list[int], complaint: str) -> None:
    def work(whole: Transport) -> None:
        if whole.rank == 0:
            with pytest.raises(ValueError, match=complaint):
                SubTransport(whole, ranks)

    run_local(3, work, timeout=5.0)


def test_error_names_the_peer_by_both_numbers() -> None:
    def work(whole: Transport) -> None:
        if whole.rank == 1:
            with pytest.raises(TransportError, match="rank 0 is rank 3 of the whole") as caught:
                SubTransport(whole, [3, 1]).exchange([], [(0, torch.zeros(3, dtype=torch.uint8))]).wait()
            assert caught.value.peers == (0,)

    run_local(4, work, timeout=20.0)
