"""A schedule as data: which chunk goes from whom to whom in which step of a multi-hop all-reduce.

n ranks reduce ``chunks`` chunks. A reduce step that sends chunk c encodes the rank's own part plus everything
received for c so far; after that the rank is done with reducing c. A reduce step that receives c keeps the message
until then. After the reduce steps a rank encodes the chunks it owns, and the gather steps hand those encodings on,
unchanged. So every rank encodes every chunk exactly once, and its rank can number its quantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Transfer = tuple[int, tuple[int, ...]]
"""The peer, and the chunks that go to it or come from it."""


class Step(NamedTuple):
    """One exchange of one rank: everything in it may be in flight together.

    Attributes:
        sends: (destination rank, chunks) of each message.
        recvs: (source rank, chunks) of each message.
    """

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


class Schedule(NamedTuple):
    """What one rank does. All ranks have the same number of steps; a rank may have nothing to do in some.

    Attributes:
        name: for people.
        rank: this rank, in 0..size-1.
        size: number of ranks n.
        chunks: number of chunks of the whole.
        reduce: steps of encoded partial sums.
        gather: steps of finished chunks.
        owned: the chunks whose sum this rank completes.
    """

    name: str
    rank: int
    size: int
    chunks: int
    reduce: tuple[Step, ...]
    gather: tuple[Step, ...]
    owned: tuple[int, ...]


ScheduleFunction = Callable[[int, int], Schedule]
"""``(rank, size) -> Schedule``, the same function on every rank."""


def check_rank(rank: int, size: int) -> None:
    """Refuse a rank outside its group.

    Raises:
        ValueError: ``size`` below 1, or ``rank`` outside 0..size-1.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"no schedule for rank {rank} of {size}; allowed: size of at least 1 and rank in 0..size-1")
