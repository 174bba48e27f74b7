"""Some ranks of a transport as a transport of their own, and the two levels of a cluster of nodes.

An all-reduce over nodes of m ranks each: inside a node every rank reduces 1/m of the gradient at full precision, ranks
of equal index all-reduce that part between the nodes with compression, and the node gathers the parts. What the network
between the nodes carries shrinks by m, and only that is quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamiq_transport.transport import Handle, Message, Transport, TransportError, check_batch


class SubTransport(Transport):
    """The chosen ranks of another transport, numbered from 0 in the order given; no collective call is needed.

    It posts on the other transport, so the messages of the two, and of other parts of it, share one order per pair of
    ranks: two parts that have a pair in common must be used in the same order on both. Errors name the peers by their
    number here. Closing it leaves the other transport open.

    Args:
        transport: the larger one.
        ranks: its ranks that belong to this one, this process's among them; the same list on each of them.

    Raises:
        ValueError: a rank out of range or given twice, or this process's own is missing.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < transport.size for rank in ranks):
            raise ValueError(f"ranks cannot be {list(ranks)}; allowed: different ones of 0..{transport.size - 1}")
        if transport.rank not in ranks:
            raise ValueError(f"ranks {list(ranks)} lack rank {transport.rank}, which asks for them")
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.posts_ahead = transport.posts_ahead
        self._transport = transport
        self._in_flight: set[_SubHandle] = set()
        self._closed = False

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_batch(self, sends, recvs)
        if self._closed:
            raise TransportError(f"the transport of rank {self.rank} is closed")
        try:
            inner = self._transport.exchange(self._outward(sends), self._outward(recvs))
        except TransportError as error:
            raise self._named(error) from error
        handle = _SubHandle(self, inner)
        self._in_flight.add(handle)
        return handle

    def close(self) -> None:
        for handle in tuple(self._in_flight):
            handle.wait()
        self._closed = True

    def abort(self) -> None:
        """Abort the other transport too: the order of its messages is lost."""
        self._in_flight.clear()
        self._closed = True
        self._transport.abort()

    def _outward(self, messages: Sequence[Message]) -> list[Message]:
        return [(self.ranks[peer], tensor) for peer, tensor in messages]

    def _named(self, error: TransportError) -> TransportError:
        peers = [self.ranks.index(peer) for peer in error.peers if peer in self.ranks]
        names = ", ".join(f"rank {peer} is rank {self.ranks[peer]} of the whole" for peer in peers)
        return TransportError(f"{error} ({names})" if names else str(error), peers)


class _SubHandle(Handle):
    def __init__(self, transport: SubTransport, inner: Handle) -> None:
        self._transport = transport
        self._inner = inner

    def wait(self) -> None:
        self._transport._in_flight.discard(self)
        try:
            self._inner.wait()
        except TransportError as error:
            self._transport._closed = True
            raise self._transport._named(error) from error


class Levels(NamedTuple):
    """The two groups that a rank belongs to.

    Attributes:
        inner: the ranks of the same node.
        outer: the ranks with the same index in every node.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]


def levels(rank: int, size: int, node_size: int) -> Levels:
    """Divide the ranks into nodes of consecutive ones, as launchers number them.

    Args:
        rank: in 0..size-1.
        size: number of ranks n.
        node_size: ranks per node m; divides n.

    Raises:
        ValueError: nodes that would be of different size, or a rank outside its group.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"no levels for rank {rank} of {size}; allowed: size of at least 1 and rank in 0..size-1")
    if node_size < 1 or size % node_size:
        fitting = ", ".join(str(m) for m in range(1, size + 1) if size % m == 0)
        raise ValueError(f"node_size cannot be {node_size} with {size} ranks; allowed: {fitting}")
    first = rank - rank % node_size
    return Levels(tuple(range(first, first + node_size)), tuple(range(rank % node_size, size, node_size)))
