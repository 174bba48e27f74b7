"""A peer that goes away while a message is on its way: with Gloo alone, that is known by the timeout only."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamiq_transport import TorchTransport, TransportError, dedicated_group, gloo
from dynamiq_transport.batch import Operation, Part
from dynamiq_transport.conformance import all_to_all, blank

Threads = Callable[..., list[Any]]

LONG = 1 << 27  # bytes, which take longer than it takes to leave


def by_timeout(error: TransportError) -> bool:
    """Whether the wait lasted until the timeout; that for something that is there or not lasts 1 ms."""
    return re.search(r"imed out waiting \d{4,}ms", str(error)) is not None


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "LOOK", 0.05)


@pytest.mark.usefixtures("look_often")
@pytest.mark.parametrize("sends", [True, False], ids=["sending", "receiving"])
def test_a_peer_that_leaves_in_the_middle_of_a_message_is_noticed(gloo_threads: Threads, sends: bool) -> None:
    landing = torch.empty(LONG, dtype=torch.uint8)

    def work(group: dist.ProcessGroup) -> TransportError | None:
        transport = TorchTransport.dedicated(group, timeout=50.0)
        peer = 1 - transport.rank
        if (transport.rank == 0) == sends:
            handle = transport.exchange([(peer, torch.ones(LONG, dtype=torch.uint8))], [])
        else:
            handle = transport.exchange([], [(peer, landing)])
        if transport.rank == 1:
            while not landing[0]:
                time.sleep(0)
            transport.abort()
            return None
        try:
            handle.wait()
        except TransportError as error:
            return error
        return None  # all of it came before the other rank got to leave

    for _ in range(20):
        landing.zero_()
        if (error := gloo_threads(2, work)[0]) is not None:
            break
    assert error is not None
    assert error.peers == (1,)
    assert not by_timeout(error)


@pytest.mark.usefixtures("look_often")
def test_a_slow_peer_is_not_taken_for_one_that_is_gone(gloo_threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = gloo.gone

    def counted(operation: dist.P2POp) -> RuntimeError | None:
        looks.append(operation.group_peer)
        return look(operation)

    monkeypatch.setattr(gloo, "gone", counted)

    def work(group: dist.ProcessGroup) -> bytes:
        with TorchTransport.dedicated(group, timeout=50.0) as transport:
            peer, landing = 1 - transport.rank, blank(LONG, "cpu")
            while transport.rank == 1 and looks.count(1) < 3:
                time.sleep(0.01)
            transport.exchange([(peer, torch.full((LONG,), 7 + peer, dtype=torch.uint8))], [(peer, landing)]).wait()
            all_to_all(transport, "cpu")  # what was posted to look is in nobody's way
            return bytes(landing[:: LONG - 1])

    assert gloo_threads(2, work) == [bytes([7, 7]), bytes([8, 8])]


@pytest.mark.usefixtures("look_often")
def test_a_peer_that_has_done_its_part_may_leave(gloo_threads: Threads) -> None:
    """Rank 1 closes while rank 0, which has all of its messages, waits for rank 2."""
    left = threading.Event()

    def work(group: dist.ProcessGroup) -> None:
        with TorchTransport.dedicated(group, timeout=50.0) as transport:
            others = [peer for peer in range(3) if peer != transport.rank]
            if transport.rank == 2:
                left.wait(50.0)
                time.sleep(0.3)
            peers = others if transport.rank == 0 else [0]
            transport.exchange(
                [(peer, blank(9, "cpu")) for peer in peers], [(peer, blank(9, "cpu")) for peer in peers]
            ).wait()
        if transport.rank == 1:
            left.set()

    gloo_threads(3, work)


@pytest.mark.usefixtures("look_often")
def test_nobody_looks_while_a_message_comes_in(gloo_threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look would reach a peer that has sent the rest and closed, and make its system drop what is not delivered."""
    samples, looks = 0, []  # at how many samples
    landing = torch.zeros(9, dtype=torch.uint8)
    sample = gloo._sample

    def coming_in(part: Part) -> list[torch.Tensor]:
        nonlocal samples
        if taken := sample(part):
            samples += 1
            landing.fill_(min(samples, 8))  # moves seven times after the first sample
        return taken

    def look(operation: dist.P2POp) -> None:
        if operation.group_peer == 1:
            looks.append(samples)

    monkeypatch.setattr(gloo, "_sample", coming_in)
    monkeypatch.setattr(gloo, "gone", look)

    def work(group: dist.ProcessGroup) -> None:
        with TorchTransport.dedicated(group, timeout=50.0) as transport:
            if transport.rank == 0:
                transport.exchange([], [(1, landing)]).wait()
                return
            while len(looks) < 2:
                time.sleep(0.01)
            transport.exchange([(0, blank(9, "cpu"))], []).wait()

    gloo_threads(2, work)
    assert looks[:2] == [10, 11]  # the ninth sample was the first of what did not move any more


def test_a_rank_that_aborts_is_missed_whoever_keeps_its_group(gloo_threads: Threads) -> None:
    """As the traceback of an error keeps what was alive when it was raised."""
    posted = threading.Barrier(2)
    kept: list[object] = []

    def work(group: dist.ProcessGroup) -> TransportError | None:
        transport = TorchTransport.dedicated(group, timeout=50.0)
        handle = transport.exchange([], [(1 - transport.rank, blank(9, "cpu"))])
        posted.wait(50.0)
        if transport.rank == 1:
            kept.extend((transport._group, *handle._parts))  # type: ignore[attr-defined]
            transport.abort()
            return None
        with pytest.raises(TransportError) as caught:
            handle.wait()
        return caught.value

    error, _ = gloo_threads(2, work)
    assert len(kept) == 2
    assert not by_timeout(error)


def test_a_look_finds_a_closed_connection(gloo_threads: Threads) -> None:
    def work(parent: dist.ProcessGroup) -> None:
        group = dedicated_group(parent, timeout=50.0)
        operation = Operation(dist.isend, blank(9, "cpu"), group, 1 - group.rank())
        all_to_all(TorchTransport(group, timeout=50.0), "cpu")
        looked.wait(50.0)
        assert gloo.gone(operation) is None
        looked.wait(50.0)
        gloo.hang_up(group)
        assert isinstance(gloo.gone(operation), RuntimeError)

    looked = threading.Barrier(2)
    gloo_threads(2, work)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts the main thread")
def test_a_wait_can_be_interrupted(gloo_rank: Callable[..., Any]) -> None:
    """By the interrupt of a terminal, for instance."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    store, left = dist.HashStore(), threading.Event()  # type: ignore[attr-defined]

    def other(group: dist.ProcessGroup) -> None:
        with pytest.raises(TransportError):
            TorchTransport.dedicated(group, timeout=50.0).exchange([], [(0, blank(9, "cpu"))]).wait()
        left.set()

    def work(group: dist.ProcessGroup) -> None:
        transport = TorchTransport.dedicated(group, timeout=50.0)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt), transport:
                transport.exchange([], [(1, blank(9, "cpu"))]).wait()
        finally:
            signal.signal(signal.SIGALRM, before)

    thread = threading.Thread(target=gloo_rank, args=(other, store, 1, 2))
    thread.start()
    gloo_rank(work, store, 0, 2)
    assert left.wait(25.0)  # half of what a wait may last
    thread.join()


def test_the_waiting_thread_ends_with_the_transport(gloo_threads: Threads) -> None:
    def waiters() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "dynamiq waiter"}

    before = waiters()

    def work(group: dist.ProcessGroup) -> Any:
        transport = TorchTransport.dedicated(group, timeout=50.0)
        all_to_all(transport, "cpu")
        met.wait(50.0)
        if transport.rank == 0:
            assert len(waiters() - before) == 2
        met.wait(50.0)
        if transport.rank == 0:
            transport.close()
        return weakref.ref(transport)  # rank 1 forgets to

    met = threading.Barrier(2)
    references = gloo_threads(2, work)
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    for thread in waiters() - before:
        thread.join(50.0)
        assert not thread.is_alive()


TWO_RANKS = """
import atexit, os, sys, threading, time
ends = []
atexit.register(lambda: [end() for end in ends])  # before all others, so that it is called after them
sys.path.insert(0, os.environ["TESTS"])
import torch.distributed as dist
from conftest import as_rank
from dynamiq_transport import TorchTransport, TransportError, gloo
from dynamiq_transport.conformance import blank

store, transports = dist.HashStore(), {}

def work(group):
    transports[group.rank()] = TorchTransport.dedicated(group, timeout=20.0)

threads = [threading.Thread(target=as_rank, args=(work, store, rank, 2)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
handle = transports[0].exchange([], [(1, blank(9, "cpu"))])
"""

INTERRUPTED = """
import signal
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    handle.wait()
except KeyboardInterrupt:
    pass

class Last:
    def __del__(self, hang_up=gloo.hang_up, group=transports[1]._group, sleep=time.sleep):
        hang_up(group)
        sleep(0.5)

sys.last = Last()  # goes when the interpreter is ending
"""

CLOSED_AT_THE_END = """
def end():
    try:
        transports[0].timeout = 0.2
        transports[0].close()
    except TransportError as error:
        print("lost:", error.peers)

ends.append(end)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts the main thread")
@pytest.mark.parametrize(("end", "lost"), [(INTERRUPTED, []), (CLOSED_AT_THE_END, ["(1,)"])])
def test_an_interpreter_that_ends_while_a_message_is_awaited(end: str, lost: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWO_RANKS + end],
        env=os.environ | {"TESTS": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    # Gloo of torch 2.10 prints as well, from both threads into one line.
    assert (ended.returncode, re.findall("lost: (.*)", ended.stdout)) == (0, lost), ended.stderr


def test_a_wait_fails_when_another_thread_aborts(gloo_threads: Threads) -> None:
    posted = threading.Barrier(2)

    def work(group: dist.ProcessGroup) -> BaseException | None:
        transport = TorchTransport.dedicated(group, timeout=50.0)
        handle = transport.exchange([], [(1 - transport.rank, blank(9, "cpu"))])
        timer = threading.Timer(0.2, transport.abort)
        timer.start()
        posted.wait(50.0)
        try:
            handle.wait()
        except BaseException as error:
            return error
        finally:
            timer.join()
        return None

    assert [type(error) for error in gloo_threads(2, work)] == [TransportError] * 2
