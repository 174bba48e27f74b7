"""Ranks that are about to do different things learn it before they do, all of them, with messages of one size."""

import pytest
import torch

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import ConfigMismatchError, all_reduce
from dynamiq_ddp.agreement import DIGEST, RECORD, agree
from dynamiq_transport import TransportError, ring

CPU = torch.device("cpu")


def wrong_way(rank, size):
    """A sound ring of the same name that runs backwards."""
    mirrored = ring(size - 1 - rank, size)
    flip = {old: size - 1 - old for old in range(size)}

    def turn(steps):
        return tuple(
            step._replace(
                sends=tuple((flip[peer], chunks) for peer, chunks in step.sends),
                recvs=tuple((flip[peer], chunks) for peer, chunks in step.recvs),
            )
            for step in steps
        )

    return mirrored._replace(rank=rank, reduce=turn(mirrored.reduce), gather=turn(mirrored.gather))


DIFFERENCES = {
    "number of elements": {"tensor": torch.ones(1001)},
    "dtype": {"tensor": torch.ones(1000).bfloat16()},
    "codec": {"codec": DynamiQ(CodecConfig(bits=4.0))},
    "schedule": {"schedule": "butterfly"},
    "step": {"step": 1},
    "bucket": {"bucket": 1},
}


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_on_every_rank_and_nothing_changes(name, n, ranks, recorder):
    odd = n - 1

    def work(transport):
        arguments = {"tensor": torch.ones(1000), "codec": DynamiQ(), "step": 0, "bucket": 0}
        if transport.rank == odd:
            arguments.update(DIFFERENCES[name])
        tensor = arguments.pop("tensor").clone()
        recorded = recorder(transport)
        with pytest.raises(ConfigMismatchError) as caught:
            all_reduce(tensor, transport=recorded, **arguments)
        assert (tensor == 1).all()
        return str(caught.value), caught.value.differences, {size for _, size in recorded.sent}

    results = ranks(n, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        text, differences, sizes = result
        assert text == results[0][0]
        assert list(differences) == [name]
        assert len(set(differences[name][:odd])) == 1
        assert f"on rank {odd}" in text
        assert sizes <= {DIGEST, *(RECORD + 4 << k for k in range(3)), 3 * (RECORD + 4)}  # of no tensor's size


def test_a_problem_of_one_rank_stands_alone(ranks):
    def work(transport):
        dtype = torch.int64 if transport.rank == 1 else torch.float32
        all_reduce(torch.ones(10, dtype=dtype), transport=transport, codec=BF16())

    for error in ranks(3, work):
        assert isinstance(error, ConfigMismatchError)
        assert list(error.differences) == ["problem"]
        first, second = str(error).splitlines()
        assert first == "the ranks disagree; nothing was changed"
        assert second.startswith("  problem: tensor cannot be torch.int64; allowed: ")
        assert second.endswith(" on rank 1")
        assert error.differences["problem"][0] == error.differences["problem"][2] == "nothing"


def test_a_problem_comes_before_what_the_others_disagree_on(ranks):
    def work(transport):
        tensor = torch.ones(10 + transport.rank, dtype=torch.int64 if transport.rank == 0 else torch.float32)
        all_reduce(tensor, transport=transport, codec=BF16())

    for error in ranks(3, work):
        assert list(error.differences) == ["problem", "number of elements"]
        assert error.differences["number of elements"] == ("nothing", "11", "12")


def test_schedules_of_the_same_name_that_differ(ranks):
    def work(transport):
        schedule = wrong_way if transport.rank == 0 else ring
        return all_reduce(torch.ones(10), transport=transport, codec=BF16(), schedule=schedule)

    for error in ranks(3, work):
        assert isinstance(error, ConfigMismatchError)
        assert list(error.differences) == ["schedule"]


def test_the_ranks_can_go_on_afterwards(ranks):
    def work(transport):
        with pytest.raises(ConfigMismatchError):
            all_reduce(torch.ones(10 + transport.rank), transport=transport, codec=BF16())
        return all_reduce(torch.full((10,), float(transport.rank)), transport=transport, codec=BF16())

    for result in ranks(3, work):
        assert torch.equal(result, torch.ones(10))


def test_every_pattern_of_differences_is_seen_by_every_rank(ranks):
    for n in (2, 3, 4, 5, 8):
        for pattern in range(1, 2 ** (n - 1)):

            def work(transport, pattern=pattern):
                return agree(transport, {"fact": pattern >> transport.rank & 1}, device=CPU)

            assert all(isinstance(error, ConfigMismatchError) for error in ranks(n, work)), (n, pattern)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_equal_facts_cost_one_digest_per_doubling(n, ranks, recorder):
    def work(transport):
        recorded = recorder(transport)
        agree(recorded, {"fact": 1}, device=CPU)
        return [size for _, size in recorded.sent]

    assert ranks(n, work) == [[DIGEST] * (n - 1).bit_length()] * n


def test_long_facts_are_cut_but_not_confused(ranks):
    def work(transport):
        return agree(transport, {"long": "x" * 100_000 + str(transport.rank), "same": "y" * 100_000}, device=CPU)

    for error in ranks(2, work):
        assert isinstance(error, ConfigMismatchError)
        assert list(error.differences) == ["long"]
        assert len(str(error)) < 2000


def test_a_rank_that_does_not_take_part_is_an_error(ranks):
    def work(transport):
        if transport.rank == 1:
            raise ValueError("elsewhere")
        return all_reduce(torch.ones(10), transport=transport, codec=BF16(), step=4)

    results = ranks(3, work)
    for rank in (0, 2):
        assert isinstance(results[rank], TransportError)
        assert "step 4" in str(results[rank])
