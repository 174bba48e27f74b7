"""The ring: every chunk travels once round all ranks while it is reduced, and once more when it is finished."""

from __future__ import annotations

from dynamiq_transport.schedules.schedule import Schedule, Step, check_rank


def ring(rank: int, size: int) -> Schedule:
    """n - 1 reduce and n - 1 gather steps, each of one chunk of 1/n to the next rank (Patarasu and Yuan, 2009).

    The least traffic on every link, the most hops: a chunk is requantised n - 1 times on its way to rank c, its owner.

    Args:
        rank: in 0..size-1.
        size: number of ranks n.

    Raises:
        ValueError: see `check_rank`.
    """
    check_rank(rank, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    steps = range(1, size)
    return Schedule(
        name="ring",
        rank=rank,
        size=size,
        chunks=size,
        reduce=tuple(_step(after, rank - k, before, rank - k - 1, size) for k in steps),
        gather=tuple(_step(after, rank - k + 1, before, rank - k, size) for k in steps),
        owned=(rank,),
    )


def _step(after: int, sent: int, before: int, received: int, size: int) -> Step:
    return Step(sends=((after, (sent % size,)),), recvs=((before, (received % size,)),))
