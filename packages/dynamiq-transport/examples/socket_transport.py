"""A transport of one's own in some sixty lines: a connected socket to every peer, and two threads that serve it.

It passes the conformance suite as it stands; tests/test_example.py is all that this takes. A message is its length in
eight bytes and then its bytes, so a wrong size is seen at once. Messages keep their order because each direction of
each socket has one thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from dynamiq_transport import Handle, Message, Transport, TransportError, check_batch


class SocketHandle(Handle):
    def __init__(self, transport: SocketTransport, parts: list[tuple[int, Future[None]]]) -> None:
        self.transport, self.parts = transport, parts

    def wait(self) -> None:
        deadline = time.monotonic() + self.transport.timeout
        for peer, future in self.parts:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except (OSError, ValueError) as error:  # a timeout is an OSError too
                self.transport.abort()
                raise TransportError(f"rank {self.transport.rank} lost rank {peer}: {error!r}", (peer,)) from error
        self.transport.in_flight.discard(self)


class SocketTransport(Transport):
    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.size, self.sockets, self.timeout = rank, size, sockets, timeout
        self.lanes = {(job, peer): ThreadPoolExecutor(1) for job in (send, receive) for peer in sockets}
        self.in_flight: set[SocketHandle] = set()
        self.closed = False

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_batch(self, sends, recvs)
        if self.closed:
            raise TransportError(f"the transport of rank {self.rank} is closed")
        jobs = [(receive, *message) for message in recvs] + [(send, *message) for message in sends]
        parts = [(peer, self.lanes[job, peer].submit(job, self.sockets[peer], tensor)) for job, peer, tensor in jobs]
        self.in_flight.add(handle := SocketHandle(self, parts))
        return handle

    def close(self) -> None:
        for handle in tuple(self.in_flight):
            handle.wait()
        self.abort()

    def abort(self) -> None:
        self.closed = True
        self.in_flight.clear()
        for link in self.sockets.values():
            with suppress(OSError):  # the peer may be gone
                link.shutdown(socket.SHUT_RDWR)  # wakes the threads that are in it
        for lane in self.lanes.values():
            lane.shutdown(cancel_futures=True)
        for link in self.sockets.values():
            link.close()


def send(link: socket.socket, tensor: Tensor) -> None:
    link.sendall(tensor.numel().to_bytes(8, "little"))
    if tensor.numel():  # the peer may have left after the header
        link.sendall(tensor.view(-1).numpy().data)


def receive(link: socket.socket, tensor: Tensor) -> None:
    fill(link, header := memoryview(bytearray(8)))
    if int.from_bytes(header, "little") != tensor.numel():
        raise ValueError(f"it sends {int.from_bytes(header, 'little')} bytes, expected are {tensor.numel()}")
    fill(link, tensor.view(-1).numpy().data)


def fill(link: socket.socket, view: memoryview) -> None:
    while len(view):
        if not (count := link.recv_into(view)):
            raise ConnectionError("it has closed")
        view = view[count:]
