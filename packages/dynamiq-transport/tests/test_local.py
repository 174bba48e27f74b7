"""What is particular to ranks that are threads of one process."""

from __future__ import annotations

import pytest
import torch

from dynamiq_transport import LocalTransport, Transport, TransportError, run_local
from dynamiq_transport.conformance import blank


def test_send_ends_only_when_the_other_side_receives() -> None:
    """As strict as any network: no buffering that would hide a deadlock."""
    sender, receiver = LocalTransport.group(2, timeout=0.2)
    handle = sender.exchange([(1, blank(1, "cpu"))], [])
    with pytest.raises(TransportError, match=r"could not send to rank 1 1 bytes: nothing happened within 0\.2 s"):
        handle.wait()
    with pytest.raises(TransportError, match="closed"):
        receiver.exchange([], [(0, blank(1, "cpu"))]).wait()


def test_both_sides_learn_of_different_sizes() -> None:
    sender, receiver = LocalTransport.group(2, timeout=20.0)
    untouched = blank(4, "cpu")
    sending = sender.exchange([(1, torch.zeros(5, dtype=torch.uint8))], [])
    receiving = receiver.exchange([], [(0, untouched)])
    for handle, peer in ((sending, 1), (receiving, 0)):
        with pytest.raises(TransportError, match="rank 0 sends 5 bytes, rank 1 expects 4") as caught:
            handle.wait()
        assert caught.value.peers == (peer,)
    assert torch.equal(untouched, blank(4, "cpu"))


def test_rank_that_leaves_fails_its_peers_at_once() -> None:
    """With a timeout of an hour, so that nothing but the leaving can end the wait."""
    first, second, third = LocalTransport.group(3, timeout=3600.0)
    waiting = first.exchange([(1, blank(9, "cpu"))], [(1, blank(9, "cpu"))])
    second.abort()
    with pytest.raises(TransportError, match="rank 1 has closed"):
        waiting.wait()
    with pytest.raises(TransportError, match="rank 1 has closed"):
        third.exchange([], [(1, blank(9, "cpu"))]).wait()


def test_cause_is_raised_and_not_what_it_led_to() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            raise KeyError("the cause")
        transport.exchange([], [(1, blank(1, "cpu"))]).wait()

    with pytest.raises(KeyError, match="the cause"):
        run_local(3, work, timeout=3600.0)


def test_results_come_in_rank_order() -> None:
    assert run_local(5, lambda transport: transport.rank, timeout=5.0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [0, -2])
def test_size_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"size {size}; allowed: 1 or more"):
        LocalTransport.group(size)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_timeout_out_of_range(timeout: float) -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        LocalTransport.group(2, timeout=timeout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_messages_follow_the_streams() -> None:
    """Each rank computes on a stream of its own; the host waits for nothing in between."""

    def work(transport: Transport) -> None:
        peer = 1 - transport.rank
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            sent = torch.full((1_000_000,), transport.rank + 1, dtype=torch.uint8, device="cuda")
            found = torch.zeros_like(sent)
            transport.exchange([(peer, sent)], [(peer, found)]).wait()
            total = found.sum(dtype=torch.int64)
            sent.zero_()
        assert total.item() == (peer + 1) * 1_000_000

    run_local(2, work, timeout=60.0)
