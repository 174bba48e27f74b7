"""The direct exchange: every rank sends each owner its part, and each owner its result to everyone."""

from __future__ import annotations

from dynamiq_transport.schedules.schedule import Schedule, Step, check_rank


def direct(rank: int, size: int) -> Schedule:
    """One reduce and one gather step, each with a message of 1/n to every other rank.

    The fewest requantisations, one per chunk after the first encoding of each gradient, and the least latency; but
    n - 1 messages at once, which a network without full bisection bandwidth does not carry at full speed.

    Args:
        rank: in 0..size-1.
        size: number of ranks n.

    Raises:
        ValueError: see `check_rank`.
    """
    check_rank(rank, size)
    # Start at the next rank, so that the first messages of all ranks go to different places.
    others = tuple((rank + k) % size for k in range(1, size))
    if not others:
        return Schedule("direct", rank, size, 1, (), (), (0,))
    theirs = tuple((peer, (peer,)) for peer in others)
    mine = tuple((peer, (rank,)) for peer in others)
    return Schedule("direct", rank, size, size, (Step(theirs, mine),), (Step(mine, theirs),), (rank,))
