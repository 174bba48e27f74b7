"""Follows a schedule: encode, exchange, keep what arrives, until every rank has the last encoding of every chunk.

What is encoded is not known here: the statistics of phase 1, the gradient of phase 2 and what travels inside a node
take the same walk.
"""

from __future__ import annotations

from collections import deque
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


class _Exchanges:
    """The exchanges of a walk, one for each step, in order.

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
        schedule = walk.route.schedule
        self._coming = deque(
            [*((step, True) for step in schedule.reduce), *((step, False) for step in schedule.gather)]
        )
        self._landings: list[Tensor] = []  # of the step to come, if its receives are posted
        self._posted: Handle | None = None

    def next(self) -> list[Tensor]:
        """Do the exchange of the next step; what has arrived, in the order of the step's receives."""
        walk = self._walk
        step, _ = self._coming[0]
        sends = [(walk.route.ranks[peer], self._frames.piece(chunks)) for peer, chunks in step.sends]
        with walk.meter.span(walk.moving, walk.device):
            if self._posted is None:
                landings, recvs = self._receives()
                batches = [walk.transport.exchange(sends, recvs)]
            else:
                landings, batches = self._landings, [self._posted, walk.transport.exchange(sends, [])]
            self._coming.popleft()
            if self._ahead and self._coming:
                self._landings, recvs = self._receives()
                self._posted = walk.transport.exchange([], recvs)
            for batch in batches:
                batch.wait()
        return landings

    def _receives(self) -> tuple[list[Tensor], list[Message]]:
        """Room for what the next step receives: for finished chunks where they belong, if they are neighbours."""
        step, reducing = self._coming[0]
        landings = [
            self._frames.room_for(chunks).buffer if reducing else self._frames.landing(chunks)
            for _, chunks in step.recvs
        ]
        ranks = [self._walk.route.ranks[peer] for peer, _ in step.recvs]
        return landings, list(zip(ranks, landings, strict=True))


def reduce_and_gather(walk: Walk) -> Frames:
    """Walk the whole schedule; the result holds the last encoding of every chunk, under its owner's slot."""
    frames = Frames(walk.sizes, walk.device, align=walk.align)
    waiting: dict[int, list[Received]] = {}
    schedule = walk.route.schedule
    exchanges = _Exchanges(walk, frames)
    for step in schedule.reduce:
        _reduce_step(walk, step, frames, waiting, exchanges)
    walk.seal.compare()
    for chunk in schedule.owned:
        _encode(walk, chunk, frames, waiting)
    for step in schedule.gather:
        _gather_step(walk, step, frames, exchanges)
    walk.seal.compare()
    return frames


def _reduce_step(
    walk: Walk, step: Step, frames: Frames, waiting: dict[int, list[Received]], exchanges: _Exchanges
) -> None:
    """Send one's encodings of some chunks, and keep what arrives until one's own encoding of its chunk."""
    for _, chunks in step.sends:
        for chunk in chunks:
            _encode(walk, chunk, frames, waiting)
    for (peer, chunks), landing in zip(step.recvs, exchanges.next(), strict=True):
        room = frames.room_for(chunks, landing)
        for i, chunk in enumerate(chunks):
            header = walk.header._replace(chunk=chunk, slot=peer)
            walk.seal.expect(walk.route.ranks[peer], header, room.header(i))
            waiting.setdefault(chunk, []).append(Received(room.message(i), peer))


def _gather_step(walk: Walk, step: Step, frames: Frames, exchanges: _Exchanges) -> None:
    """Hand on finished chunks as they are."""
    for (peer, chunks), landing in zip(step.recvs, exchanges.next(), strict=True):
        frames.settle(chunks, landing)
        for chunk in chunks:
            header = walk.header._replace(chunk=chunk, slot=walk.route.owners[chunk])
            walk.seal.expect(walk.route.ranks[peer], header, frames.header(chunk))


def _encode(walk: Walk, chunk: int, frames: Frames, waiting: dict[int, list[Received]]) -> None:
    walk.encode(chunk, waiting.pop(chunk, ()), frames.message(chunk))
    with walk.meter.span(walk.moving, walk.device):
        walk.seal.write(walk.header._replace(chunk=chunk, slot=walk.route.schedule.rank), frames.header(chunk))
