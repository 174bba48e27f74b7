"""What every transport must do, as tests that pytest collects; needs pytest, and is imported by nothing else here.

A test file for one's own transport is three lines::

    from dynamiq_transport.conformance import Conformance

    class TestMine(Conformance):
        launch = staticmethod(run_mine)

``run_mine(size, function, *, timeout)`` calls ``function(transport)`` on every rank of a new group of that size, with
that timeout of a wait, and raises what a rank raised; threads, processes and machines are its own business. Where the
ranks exist before the test, as under mpiexec, each process calls the function for its own rank. The functions below are
module-level and take their arguments through `functools.partial`, so that they can be sent to another process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from dynamiq_transport.agree import gather_records
from dynamiq_transport.schedules import ScheduleFunction, butterfly, direct, ring
from dynamiq_transport.transport import Message, Transport, TransportError

RankFunction = Callable[[Transport], Any]

BYTES = (0, 1, 2, 3, 7, 16, 255, 256, 257, 1000, 4097, 65_537, 1_000_003, 10_000_000)
SCHEDULES = (ring, butterfly, direct)

_PATIENCE = 60.0  # seconds, where nothing is expected to fail
_IMPATIENCE = 1.0  # seconds, where something is


class Launch(Protocol):
    """Runs a function on every rank of a new group; see the module's docstring."""

    def __call__(self, size: int, function: RankFunction, *, timeout: float) -> Any: ...


class Conformance:
    """Derive from it, name the class ``Test...``, and set ``launch``.

    Attributes:
        launch: runs a function on every rank of a new group.
        sizes: numbers of ranks to try, one of them at least 2.
        device: where the messages live.
        detects_sizes: whether a message of another size than expected raises `TransportError`, as opposed to going
            unseen; sizes are then guarded by agreement alone.
    """

    launch: Launch
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 8)
    device: str = "cpu"
    detects_sizes: bool = True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every number of ranks; what concerns a failing peer needs two."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)
        if "two_or_more" in metafunc.fixturenames:
            metafunc.parametrize("two_or_more", [min(size for size in self.sizes if size > 1)])

    def run(self, function: RankFunction, size: int, timeout: float = _PATIENCE) -> None:
        self.launch(size, function, timeout=timeout)

    def test_every_size_of_message(self, size: int) -> None:
        self.run(partial(pass_round, device=self.device), size)

    def test_every_pair_has_its_own_bytes(self, size: int) -> None:
        self.run(partial(all_to_all, device=self.device), size)

    def test_several_messages_keep_their_order(self, size: int) -> None:
        self.run(partial(several_per_peer, device=self.device), size)

    def test_empty_messages_and_batches(self, size: int) -> None:
        self.run(partial(empty_messages, device=self.device), size)

    def test_two_hundred_in_flight(self, size: int) -> None:
        self.run(partial(many_in_flight, device=self.device), size)

    def test_receives_may_be_posted_ahead(self, size: int) -> None:
        self.run(partial(posted_ahead, device=self.device), size)

    def test_abort_leaves_what_was_posted_ahead(self, two_or_more: int) -> None:
        self.run(partial(abandoned, device=self.device), two_or_more)

    def test_buffers_live_until_the_wait(self, size: int) -> None:
        self.run(partial(dropped_buffers, device=self.device), size)

    def test_buffers_are_free_after_the_wait(self, size: int) -> None:
        self.run(partial(reused_buffers, device=self.device), size)

    def test_only_the_given_bytes_are_touched(self, size: int) -> None:
        self.run(partial(views, device=self.device), size)

    def test_first_traffic_may_be_of_some_ranks_only(self, size: int) -> None:
        self.run(partial(some_ranks_only, device=self.device), size)

    def test_any_dtype_travels_as_bytes(self, size: int) -> None:
        self.run(partial(other_dtypes, device=self.device), size)

    def test_close_finishes_what_nobody_waited_for(self, size: int) -> None:
        self.run(partial(unawaited_send, device=self.device), size)

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
    def test_schedules_sum(self, size: int, schedule: ScheduleFunction) -> None:
        self.run(partial(sum_by_schedule, schedule=schedule, device=self.device), size)

    def test_records_are_gathered(self, size: int) -> None:
        self.run(partial(records, device=self.device), size)

    def test_bad_batches_are_refused_and_change_nothing(self, size: int) -> None:
        self.run(partial(bad_batches, device=self.device), size)

    def test_closed_transport_refuses(self, size: int) -> None:
        self.run(closed, size)

    @pytest.mark.parametrize("surplus", [-1, 1, 1_000_000])
    def test_wrong_size_is_an_error(self, two_or_more: int, surplus: int) -> None:
        if not self.detects_sizes:
            pytest.skip("this transport cannot see a wrong size; sizes are agreed beforehand")
        self.run(partial(wrong_size, surplus=surplus, device=self.device), two_or_more, _IMPATIENCE)

    def test_absent_peer_is_an_error(self, size: int) -> None:
        self.run(partial(absent_peer, device=self.device), size, _IMPATIENCE)

    def test_failed_transport_refuses(self, two_or_more: int) -> None:
        self.run(partial(absent_peer, again=True, device=self.device), two_or_more, _IMPATIENCE)


def payload(nbytes: int, source: int, target: int, index: int = 0, device: str = "cpu") -> Tensor:
    """Bytes that differ between any two messages of these tests."""
    cycle = torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes]
    return (cycle * (2 * index + 1) + (31 * source + 97 * target)).to(device)


def check(found: Tensor, source: int, target: int, index: int = 0) -> None:
    """Compare what has arrived with what was sent."""
    expected = payload(found.numel(), source, target, index)
    assert torch.equal(found.cpu(), expected), f"message {index} of {found.numel()} bytes, rank {source} to {target}"


def blank(nbytes: int, device: str) -> Tensor:
    """A buffer whose content would be noticed."""
    return torch.full((nbytes,), 173, dtype=torch.uint8, device=device)


def neighbours(transport: Transport) -> tuple[int, int] | None:
    """The next and the previous rank, or None for a rank alone."""
    if transport.size == 1:
        return None
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def pass_round(transport: Transport, device: str) -> None:
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    for nbytes in BYTES:
        found = blank(nbytes, device)
        sent = payload(nbytes, transport.rank, after, device=device)
        transport.exchange([(after, sent)], [(before, found)]).wait()
        check(found, before, transport.rank)


def all_to_all(transport: Transport, device: str) -> None:
    rank = transport.rank
    others = [peer for peer in range(transport.size) if peer != rank]
    sends = [(peer, payload(1001 * rank + 77 * peer, rank, peer, device=device)) for peer in others]
    recvs = [(peer, blank(1001 * peer + 77 * rank, device)) for peer in reversed(others)]
    transport.exchange(sends, recvs).wait()
    for peer, found in recvs:
        check(found, peer, rank)


def several_per_peer(transport: Transport, device: str) -> None:
    """Equal and different sizes between the same two ranks, in one batch and in the next."""
    rank = transport.rank
    others = [peer for peer in range(transport.size) if peer != rank]
    sizes = (100, 100, 7, 5000, 100, 0, 7)
    sends = [(peer, payload(n, rank, peer, k, device)) for k, n in enumerate(sizes) for peer in others]
    recvs = [(peer, blank(n, device)) for n in sizes for peer in others]
    handles = [transport.exchange(sends[: len(others)], recvs[: len(others)])]
    handles.append(transport.exchange(sends[len(others) :], recvs[len(others) :]))
    for handle in handles:
        handle.wait()
    for k, (peer, found) in enumerate(recvs):
        check(found, peer, rank, k // len(others))


def empty_messages(transport: Transport, device: str) -> None:
    transport.exchange([], []).wait()
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    for nbytes in (0, 5, 0):
        found = blank(nbytes, device)
        sends = [(after, payload(nbytes, transport.rank, after, device=device)), (after, blank(0, device))]
        handle = transport.exchange(sends, [(before, found), (before, blank(0, device))])
        handle.wait()
        handle.wait()
        check(found, before, transport.rank)


def many_in_flight(transport: Transport, device: str) -> None:
    """Posted one after the other, waited for from both ends."""
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    found = [blank(1 + 13 * (k % 40), device) for k in range(200)]
    handles = [
        transport.exchange(
            [(after, payload(buffer.numel(), transport.rank, after, k, device))],
            [(before, buffer)],
        )
        for k, buffer in enumerate(found)
    ]
    for handle in handles[:100] + handles[:99:-1]:
        handle.wait()
    for k, buffer in enumerate(found):
        check(buffer, before, transport.rank, k)


def posted_ahead(transport: Transport, device: str) -> None:
    """Every receive before any send, each in a batch of its own, where the transport says that it is possible."""
    skip_unless_ahead(transport)
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    found = [blank(n, device) for n in (100, 100, 7, 50_000, 100)]
    handles = [transport.exchange([], [(before, buffer)]) for buffer in found]
    for k, buffer in enumerate(found):
        sent = payload(buffer.numel(), transport.rank, after, k, device)
        transport.exchange([(after, sent)], []).wait()
        handles[k].wait()
        check(buffer, before, transport.rank, k)


def abandoned(transport: Transport, device: str) -> None:
    """Rank 0 posts a receive that rank 1 never serves; an `abort` that finished it first would raise."""
    skip_unless_ahead(transport)
    told = blank(1, device)
    if transport.rank == 0:
        transport.exchange([], [(1, blank(1000, device))])
        transport.exchange([(1, told)], []).wait()  # until then rank 1 stays
        transport.abort()
        with pytest.raises(TransportError):
            transport.exchange([], [])
    elif transport.rank == 1:
        transport.exchange([], [(0, told)]).wait()


def skip_unless_ahead(transport: Transport) -> None:
    if not transport.posts_ahead:
        pytest.skip("this transport says that receives may not be posted ahead of the sends that peers wait for")


def dropped_buffers(transport: Transport, device: str) -> None:
    """Nobody but the transport knows the sent buffer between the post and the wait."""
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    found = blank(10_000_000, device)
    handle = transport.exchange(
        [(after, payload(found.numel(), transport.rank, after, device=device))], [(before, found)]
    )
    gc.collect()
    noise = blank(10_000_000, device)  # would reuse memory that was given back
    handle.wait()
    check(found, before, transport.rank)
    assert int(noise[0]) == 173


def reused_buffers(transport: Transport, device: str) -> None:
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    sent = blank(100_000, device)
    for index in range(5):
        found = blank(100_000, device)
        sent.copy_(payload(100_000, transport.rank, after, index))
        transport.exchange([(after, sent)], [(before, found)]).wait()
        sent.zero_()
        check(found, before, transport.rank, index)


def views(transport: Transport, device: str) -> None:
    """Contiguous parts of larger buffers, of any shape and alignment."""
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    store = blank(1000, device)
    large = payload(1003, transport.rank, after, device=device)
    transport.exchange([(after, large[3:].view(10, 100)[2:5])], [(before, store[100:400].view(30, 10))]).wait()
    expected = torch.full((1000,), 173, dtype=torch.uint8)
    expected[100:400] = payload(1003, before, transport.rank)[203:503]
    assert torch.equal(store.cpu(), expected)


def some_ranks_only(transport: Transport, device: str) -> None:
    """The first and the last rank speak before any other rank does."""
    rank, last = transport.rank, transport.size - 1
    if transport.size == 1:
        return
    if rank in (0, last):
        peer = last - rank
        found = blank(3000, device)
        transport.exchange([(peer, payload(3000, rank, peer, device=device))], [(peer, found)]).wait()
        check(found, peer, rank)
    all_to_all(transport, device)


def other_dtypes(transport: Transport, device: str) -> None:
    """Types that some backends refuse, and a tensor that requires a gradient."""
    if (pair := neighbours(transport)) is None:
        return
    after, before = pair
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint16, torch.int64):
        sent = torch.full((33,), transport.rank, device=device).to(dtype)
        if dtype.is_floating_point:
            sent.requires_grad_()
        found = torch.full((33,), 99, device=device).to(dtype)
        transport.exchange([(after, sent.detach().view(torch.uint8))], [(before, found.view(torch.uint8))]).wait()
        assert torch.equal(found.float().cpu(), torch.full((33,), float(before)))


def unawaited_send(transport: Transport, device: str) -> None:
    """Every rank but the last sends to it and leaves without waiting."""
    rank, last = transport.rank, transport.size - 1
    if rank != last:
        transport.exchange([(last, payload(100_000, rank, last, device=device))], [])
        transport.close()
        return
    recvs = [(peer, blank(100_000, device)) for peer in range(last)]
    for message in recvs:
        transport.exchange([], [message]).wait()
    for peer, found in recvs:
        check(found, peer, rank)


def sum_by_schedule(transport: Transport, schedule: ScheduleFunction, device: str) -> None:
    """An all-reduce of bytes, modulo 256, in the order that the schedule gives."""
    rank, size = transport.rank, transport.size
    plan = schedule(rank, size)
    chunks = [payload(100 + chunk, rank, 0, chunk, device) for chunk in range(plan.chunks)]
    for step in plan.reduce:
        recvs = [(peer, torch.empty_like(chunks[c]), c) for peer, parts in step.recvs for c in parts]
        sends = [(peer, chunks[c]) for peer, parts in step.sends for c in parts]
        transport.exchange(sends, [(peer, buffer) for peer, buffer, _ in recvs]).wait()
        for _, buffer, chunk in recvs:
            chunks[chunk] += buffer
    for step in plan.gather:
        recvs = [(peer, chunks[c], c) for peer, parts in step.recvs for c in parts]
        sends = [(peer, chunks[c]) for peer, parts in step.sends for c in parts]
        transport.exchange(sends, [(peer, buffer) for peer, buffer, _ in recvs]).wait()
    for chunk, found in enumerate(chunks):
        expected = sum(
            (payload(100 + chunk, peer, 0, chunk) for peer in range(1, size)), payload(100 + chunk, 0, 0, chunk)
        )
        assert torch.equal(found.cpu(), expected), f"chunk {chunk} on rank {rank}"


def records(transport: Transport, device: str) -> None:
    found = gather_records(transport, b"r" * transport.rank + b"\0", 40, device=device)
    assert found == [b"r" * rank + b"\0" for rank in range(transport.size)]


def bad_batches(transport: Transport, device: str) -> None:
    rank, size = transport.rank, transport.size
    good = blank(8, device)
    wrong: list[tuple[Message, str]] = [
        ((rank, good), f"rank {rank};"),
        ((size, good), f"rank {size};"),
        ((-1, good), "rank -1;"),
    ]
    if size > 1:
        peer = (rank + 1) % size
        wrong.append(((peer, blank(8, device).view(2, 4).t()), "strides"))
        wrong.append(((peer, torch.zeros(8, device=device)), "float32"))
    fine: list[Message] = [] if size == 1 else [((rank + 1) % size, good)]
    for message, complaint in wrong:
        with pytest.raises(ValueError, match=complaint):
            transport.exchange([*fine, message], [])
        with pytest.raises(ValueError, match=complaint):
            transport.exchange(fine, [message])
    all_to_all(transport, device)


def closed(transport: Transport) -> None:
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.exchange([], [])


def wrong_size(transport: Transport, surplus: int, device: str) -> None:
    """Rank 0 sends other than 1,000,001 bytes; the receiver must not take them for its message."""
    if transport.rank == 1:
        with pytest.raises(TransportError) as caught:
            transport.exchange([], [(0, blank(1_000_001, device))]).wait()
        assert caught.value.peers == (0,)
        transport.abort()
    elif transport.rank == 0:
        try:  # whether the sender notices is up to the transport
            transport.exchange([(1, blank(1_000_001 + surplus, device))], []).wait()
        except TransportError as error:
            assert error.peers == (1,)
        transport.abort()


def absent_peer(transport: Transport, device: str, again: bool = False) -> None:
    """The last rank never takes part; everybody who waits for it is told so, and told again."""
    rank, last = transport.rank, transport.size - 1
    if rank == last:
        transport.abort()
        return
    buffers = [(last, blank(1_000_000, device))], [(last, blank(1_000_000, device))]
    with pytest.raises(TransportError) as caught:
        transport.exchange(*buffers).wait()
    assert caught.value.peers == (last,)
    assert f"rank {last}" in str(caught.value) or f"peer {last}" in str(caught.value)
    if again:
        with pytest.raises(TransportError):
            transport.exchange(*buffers)
    transport.abort()
