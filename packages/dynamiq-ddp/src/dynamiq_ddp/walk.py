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
from dynamiq_transport import Step, Transport

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


def reduce_and_gather(walk: Walk) -> Frames:
    """Walk the whole schedule; the result holds the last encoding of every chunk, under its owner's slot."""
    frames = Frames(walk.sizes, walk.device, align=walk.align)
    waiting: dict[int, list[Received]] = {}
    schedule = walk.route.schedule
    for step in schedule.reduce:
        _reduce_step(walk, step, frames, waiting)
    walk.seal.compare()
    for chunk in schedule.owned:
        _encode(walk, chunk, frames, waiting)
    for step in schedule.gather:
        _gather_step(walk, step, frames)
    walk.seal.compare()
    return frames


def _reduce_step(walk: Walk, step: Step, frames: Frames, waiting: dict[int, list[Received]]) -> None:
    """Send one's encodings of some chunks, and keep what arrives until one's own encoding of its chunk."""
    for _, chunks in step.sends:
        for chunk in chunks:
            _encode(walk, chunk, frames, waiting)
    ranks = walk.route.ranks
    incoming = [(peer, chunks, frames.room_for(chunks)) for peer, chunks in step.recvs]
    sends = [(ranks[peer], frames.piece(chunks)) for peer, chunks in step.sends]
    with walk.meter.span(walk.moving, walk.device):
        walk.transport.exchange(sends, [(ranks[peer], room.buffer) for peer, _, room in incoming]).wait()
    for peer, chunks, room in incoming:
        for i, chunk in enumerate(chunks):
            walk.seal.expect(ranks[peer], walk.header._replace(chunk=chunk, slot=peer), room.header(i))
            waiting.setdefault(chunk, []).append(Received(room.message(i), peer))


def _gather_step(walk: Walk, step: Step, frames: Frames) -> None:
    """Hand on finished chunks as they are."""
    ranks = walk.route.ranks
    incoming = [(ranks[peer], chunks, frames.landing(chunks)) for peer, chunks in step.recvs]
    sends = [(ranks[peer], frames.piece(chunks)) for peer, chunks in step.sends]
    with walk.meter.span(walk.moving, walk.device):
        walk.transport.exchange(sends, [(peer, landing) for peer, _, landing in incoming]).wait()
    for peer, chunks, landing in incoming:
        frames.settle(chunks, landing)
        for chunk in chunks:
            header = walk.header._replace(chunk=chunk, slot=walk.route.owners[chunk])
            walk.seal.expect(peer, header, frames.header(chunk))


def _encode(walk: Walk, chunk: int, frames: Frames, waiting: dict[int, list[Received]]) -> None:
    walk.encode(chunk, waiting.pop(chunk, ()), frames.message(chunk))
    with walk.meter.span(walk.moving, walk.device):
        walk.seal.write(walk.header._replace(chunk=chunk, slot=walk.route.schedule.rank), frames.header(chunk))
