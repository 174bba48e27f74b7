"""Ranks as threads of one process: for tests, for simulation, and to read how a transport behaves.

A message is copied once, straight from the sender's buffer into the receiver's, when both sides have posted it. So a
send completes only when the receiver takes part, as on the strictest real networks, and code that works here does
not depend on hidden buffering.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from dynamiq_transport.transport import (
    DEFAULT_TIMEOUT,
    Handle,
    Message,
    Transport,
    TransportError,
    check_batch,
    check_timeout,
)

T = TypeVar("T")


class _Post:
    """One message as one side has posted it."""

    __slots__ = ("copied", "error", "finished", "owner", "ready", "tensor")

    def __init__(self, owner: int, tensor: Tensor) -> None:
        self.owner = owner
        self.tensor = tensor
        self.finished = threading.Event()
        self.error: str | None = None
        self.ready = _mark(tensor)  # the buffer may be touched from here on
        self.copied: torch.cuda.Event | None = None  # and is complete from here on

    def fail(self, reason: str) -> None:
        self.error = reason
        self.finished.set()


class _Link:
    """Messages on the way from one rank to another, in the order of their posting; one of the queues is empty."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: deque[_Post] = deque()
        self.recvs: deque[_Post] = deque()


class _Group:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.links = {(a, b): _Link() for a in range(size) for b in range(size) if a != b}
        self.closed = [False] * size

    def post(self, source: int, target: int, post: _Post) -> None:
        link = self.links[source, target]
        peer = target if post.owner == source else source
        mine, theirs = (link.sends, link.recvs) if post.owner == source else (link.recvs, link.sends)
        with link.lock:
            if self.closed[peer]:
                post.fail(f"rank {peer} has closed")
                return
            if not theirs:
                mine.append(post)
                return
            match = theirs.popleft()
        send, recv = (post, match) if post.owner == source else (match, post)
        _copy(send, recv, source, target)

    def close(self, rank: int) -> None:
        self.closed[rank] = True
        for (source, target), link in self.links.items():
            if rank in (source, target):
                with link.lock:
                    for post in (*link.sends, *link.recvs):
                        post.fail(f"rank {rank} has closed")
                    link.sends.clear()
                    link.recvs.clear()


class _LocalHandle(Handle):
    def __init__(self, transport: LocalTransport, posts: list[tuple[str, int, _Post]]) -> None:
        self._transport = transport
        self._posts = posts
        self._lost: tuple[int, ...] = ()

    def wait(self) -> None:
        if self._lost:
            raise TransportError(f"this batch has failed before (peers {self._lost})", self._lost)
        posts, self._posts = self._posts, []
        transport = self._transport
        transport._in_flight.discard(self)
        deadline = time.monotonic() + transport.timeout
        for verb, peer, post in posts:
            in_time = post.finished.wait(max(0.0, deadline - time.monotonic()))
            if not in_time or post.error is not None:
                reason = post.error if in_time else f"nothing happened within {transport.timeout:g} s"
                self._lost = (peer,)
                transport.abort()
                raise TransportError(
                    f"rank {transport.rank} could not {verb} rank {peer} {post.tensor.numel()} bytes: {reason}", (peer,)
                )
            if post.copied is not None:
                torch.cuda.current_stream(post.tensor.device).wait_event(post.copied)


class LocalTransport(Transport):
    """A rank among others in the same process, each on its own thread; made by `LocalTransport.group`.

    CPU and CUDA tensors. A pair of messages of different sizes fails on both ranks. A rank that has closed, aborted
    or failed makes everything fail at once that its peers still expect of it, now or later.

    Attributes:
        timeout: seconds that a wait lasts at most.
    """

    posts_ahead = True

    def __init__(self, rank: int, size: int, shared: _Group, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._shared = shared
        self._in_flight: set[_LocalHandle] = set()

    @classmethod
    def group(cls, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[LocalTransport]:
        """Make the transports of all ranks of a new group.

        Args:
            size: number of ranks, at least 1.
            timeout: seconds that a wait lasts at most, above 0.

        Raises:
            ValueError: a size or timeout out of range.
        """
        if size < 1:
            raise ValueError(f"a group cannot have size {size}; allowed: 1 or more")
        check_timeout(timeout)
        shared = _Group(size)
        return [cls(rank, size, shared, timeout) for rank in range(size)]

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_batch(self, sends, recvs)
        if self._shared.closed[self.rank]:
            raise TransportError(f"the transport of rank {self.rank} is closed")
        posts = []
        for peer, tensor in recvs:
            post = _Post(self.rank, tensor)
            self._shared.post(peer, self.rank, post)
            posts.append(("receive from", peer, post))
        for peer, tensor in sends:
            post = _Post(self.rank, tensor)
            self._shared.post(self.rank, peer, post)
            posts.append(("send to", peer, post))
        handle = _LocalHandle(self, posts)
        self._in_flight.add(handle)
        return handle

    def close(self) -> None:
        try:
            for handle in tuple(self._in_flight):
                handle.wait()
        finally:
            self.abort()

    def abort(self) -> None:
        self._in_flight.clear()
        self._shared.close(self.rank)


def run_local(size: int, function: Callable[[Transport], T], *, timeout: float = DEFAULT_TIMEOUT) -> list[T]:
    """Call ``function(transport)`` on every rank of a new `LocalTransport` group, one thread each.

    A rank closes when its function ends, so that the failure of one rank ends the others too.

    Args:
        size: number of ranks, at least 1.
        function: what a rank does.
        timeout: seconds that a wait lasts at most.

    Returns:
        What the function returned on each rank.

    Raises:
        Exception: what the function raised on a rank; the cause rather than the `TransportError` that it led to.
    """

    def work(transport: LocalTransport) -> T:
        with transport:
            return function(transport)

    with ThreadPoolExecutor(max_workers=size, thread_name_prefix="rank") as pool:  # a thread for every rank at once
        futures = [pool.submit(work, transport) for transport in LocalTransport.group(size, timeout=timeout)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    return [future.result() for future in futures]


def _mark(tensor: Tensor) -> torch.cuda.Event | None:
    """The point that the tensor's current stream has reached; None on CPU, where calls are done when they return."""
    if not tensor.is_cuda:
        return None
    with torch.cuda.device(tensor.device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


def _copy(send: _Post, recv: _Post, source: int, target: int) -> None:
    """Move the bytes, on whichever thread came second, and tell both sides."""
    if send.tensor.numel() != recv.tensor.numel():
        reason = (
            f"rank {source} sends {send.tensor.numel()} bytes, rank {target} expects {recv.tensor.numel()}: "
            "the ranks disagree on the size"
        )
        send.fail(reason)
        recv.fail(reason)
        return
    for post in (send, recv):
        if post.ready is not None:
            torch.cuda.current_stream(post.tensor.device).wait_event(post.ready)
    recv.tensor.view(-1).copy_(send.tensor.view(-1), non_blocking=True)
    for post in (send, recv):
        post.copied = _mark(post.tensor)
        post.finished.set()
