"""Follows a schedule: encode, exchange, keep what arrives, until every rank has the last encoding of every chunk.

What is encoded is not known here: the statistics of phase 1, the gradient of phase 2 and what travels inside a node
take the same walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Received
from dynamiq_transport import Handle, Message, Step, Transport

from .frames import Frames, Header, Seal
from .meter import Activity, Meter
from .route import Route

Encode = Callable[[int, Sequence[Received], Tensor], None]
"""``encode(chunk, received, out)``: write one's own part plus everything received into ``out``; counts its own time."""


class Walk(NamedTuple):
    """One phase of one all-reduce.

    Attributes:
        route: which way.
        transport: who carries the bytes, to the ranks of the route.
        sizes: bytes of each chunk's message, the same on all ranks.
        encode: how a message is made; called exactly once for every chunk.
        header: what the headers say; chunk and slot are filled in.
        seal: compares the headers that arrive.
        device: where the messages live.
        align: messages in one piece start at multiples of this many bytes.
        meter: where the time is counted.
        moving: as what the time of the exchanges counts.
    """

    route: Route
    transport: Transport
    sizes: Sequence[int]
    encode: Encode
    header: Header
    seal: Seal
    device: torch.device
    align: int
    meter: Meter
    moving: Activity

    def from_rank(self, chunk: int, rank: int) -> Header:
        """What the header says of a rank's encoding of a chunk; ranks as the schedule numbers them."""
        return self.header._replace(chunk=chunk, slot=rank)

    def own(self, chunk: int) -> Header:
        """The same for this rank's encoding."""
        return self.from_rank(chunk, self.route.schedule.rank)

    def finished(self, chunk: int) -> Header:
        """The same for the last encoding, by the chunk's owner."""
        return self.from_rank(chunk, self.route.owners[chunk])

    def headers(self) -> list[Header]:
        """All that are written, and that should arrive."""
        reduce, gather, owned = self.route.schedule.reduce, self.route.schedule.gather, self.route.schedule.owned
        written = [self.own(chunk) for step in reduce for _, chunks in step.sends for chunk in chunks]
        partial = [self.from_rank(chunk, peer) for step in reduce for peer, chunks in step.recvs for chunk in chunks]
        whole = [self.finished(chunk) for step in gather for _, chunks in step.recvs for chunk in chunks]
        return [*written, *map(self.own, owned), *partial, *whole]


class _Exchanges:
    """The exchanges of a walk; its steps are numbered from 0, those of the gathering after those of the reducing.

    Where the transport allows it, the receives of a step are posted while the step before is under way: the peers'
    messages need not wait until they are asked for, which takes a message of its own.

    Args:
        walk: whose.
        frames: where finished chunks land.
    """

    def __init__(self, walk: Walk, frames: Frames) -> None:
        self._walk = walk
        self._frames = frames
        self._ahead = walk.transport.posts_ahead and walk.device.type == "cpu"
        self._steps = (*walk.route.schedule.reduce, *walk.route.schedule.gather)
        self._posted: dict[int, tuple[list[Tensor], Handle]] = {}  # by step, what was posted ahead

    def do(self, number: int) -> list[Tensor]:
        """Do the exchange of a step; what has arrived, in the order of the step's receives."""
        walk, step = self._walk, self._steps[number]
        sends = [(walk.route.ranks[peer], self._frames.piece(chunks)) for peer, chunks in step.sends]
        with walk.meter.span(walk.moving, walk.device):
            if number in self._posted:
                landings, receiving = self._posted.pop(number)
                batches = [receiving, walk.transport.exchange(sends, [])]
            else:
                landings, recvs = self._receives(number)
                batches = [walk.transport.exchange(sends, recvs)]
            ahead = self._ahead and number + 1 < len(self._steps)
            overlaps = ahead and self._overlaps(number)
            if ahead and not overlaps:
                self._post(number + 1)
            for batch in batches:
                batch.wait()
            if overlaps:  # as early as it is allowed
                self._post(number + 1)
        return landings

    def _overlaps(self, number: int) -> bool:
        """Whether the next step receives finished chunks into the memory that a step sends partial sums from."""
        sent = {chunk for _, chunks in self._steps[number].sends for chunk in chunks}
        return any(not sent.isdisjoint(chunks) for _, chunks in self._steps[number + 1].recvs)

    def _post(self, number: int) -> None:
        landings, recvs = self._receives(number)
        self._posted[number] = landings, self._walk.transport.exchange([], recvs)

    def _receives(self, number: int) -> tuple[list[Tensor], list[Message]]:
        """Room for what a step receives: for finished chunks where they belong, if they are neighbours."""
        recvs = self._steps[number].recvs
        reducing = number < len(self._walk.route.schedule.reduce)
        landings = [
            self._frames.room_for(chunks).buffer if reducing else self._frames.landing(chunks) for _, chunks in recvs
        ]
        ranks = [self._walk.route.ranks[peer] for peer, _ in recvs]
        return landings, list(zip(ranks, landings, strict=True))


def reduce_and_gather(walk: Walk) -> Frames:
    """Walk the whole schedule; the result holds the last encoding of every chunk, under its owner's slot.

    After an error of any kind the transport is aborted: it may have receives that were posted ahead, and peers may
    wait for messages that this rank will not send.
    """
    try:
        return _reduce_and_gather(walk)
    except BaseException:
        walk.transport.abort()
        raise


def _reduce_and_gather(walk: Walk) -> Frames:
    frames = Frames(walk.sizes, walk.device, align=walk.align)
    waiting: dict[int, list[Received]] = {}
    schedule = walk.route.schedule
    exchanges = _Exchanges(walk, frames)
    walk.seal.prepare(walk.headers())
    for number, step in enumerate(schedule.reduce):
        for _, chunks in step.sends:
            for chunk in chunks:
                _encode(walk, chunk, frames, waiting)
        _keep(walk, step, frames, waiting, exchanges.do(number))
    walk.seal.compare()
    for chunk in schedule.owned:
        _encode(walk, chunk, frames, waiting)
    for number, step in enumerate(schedule.gather, start=len(schedule.reduce)):
        _settle(walk, step, frames, exchanges.do(number))
    walk.seal.compare()
    return frames


def _keep(
    walk: Walk, step: Step, frames: Frames, waiting: dict[int, list[Received]], landings: Sequence[Tensor]
) -> None:
    """Keep what has arrived until one's own encoding of its chunk."""
    for (peer, chunks), landing in zip(step.recvs, landings, strict=True):
        room = frames.room_for(chunks, landing)
        for i, chunk in enumerate(chunks):
            walk.seal.expect(walk.route.ranks[peer], walk.from_rank(chunk, peer), room.header(i))
            waiting.setdefault(chunk, []).append(Received(room.message(i), peer))


def _settle(walk: Walk, step: Step, frames: Frames, landings: Sequence[Tensor]) -> None:
    """Bring the finished chunks that have arrived into their places, to be handed on as they are."""
    for (peer, chunks), landing in zip(step.recvs, landings, strict=True):
        frames.settle(chunks, landing)
        for chunk in chunks:
            walk.seal.expect(walk.route.ranks[peer], walk.finished(chunk), frames.header(chunk))


def _encode(walk: Walk, chunk: int, frames: Frames, waiting: dict[int, list[Received]]) -> None:
    walk.encode(chunk, waiting.pop(chunk, ()), frames.message(chunk))
    with walk.meter.span(walk.moving, walk.device):
        walk.seal.write(walk.own(chunk), frames.header(chunk))
