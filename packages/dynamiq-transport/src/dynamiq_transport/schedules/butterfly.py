"""The butterfly: ranks pair up at halving distances, and each pair splits what is left of the chunks."""

from __future__ import annotations

from dynamiq_transport.schedules.schedule import Schedule, Step, check_rank


def butterfly(rank: int, size: int) -> Schedule:
    """Recursive halving, then recursive doubling: log2 n steps each (Thakur, Rabenseifner and Gropp, 2005).

    Few hops: a chunk passes at most log2 n requantisations. There are p chunks, the largest power of two up to n. The
    n - p ranks above it take part by proxy: each first folds all its chunks into a rank below, and is served last.

    Args:
        rank: in 0..size-1.
        size: number of ranks n.

    Raises:
        ValueError: see `check_rank`.
    """
    check_rank(rank, size)
    power = 1 << (size.bit_length() - 1)
    reduce = _halving(rank, power) if rank < power else (Step(),) * (power.bit_length() - 1)
    if size > power:
        reduce = (_fold(rank, size, power), *reduce)
    # Recursive doubling is recursive halving backwards: what was sent comes back finished.
    gather = tuple(Step(sends=step.recvs, recvs=step.sends) for step in reversed(reduce))
    return Schedule("butterfly", rank, size, power, reduce, gather, owned=(rank,) if rank < power else ())


def _fold(rank: int, size: int, power: int) -> Step:
    """The step in which the ranks above the power of two hand over everything they have."""
    everything = tuple(range(power))
    if rank >= power:
        return Step(sends=((rank - power, everything),))
    if rank + power < size:
        return Step(recvs=((rank + power, everything),))
    return Step()


def _halving(rank: int, power: int) -> tuple[Step, ...]:
    """Keep the half of the remaining chunks that holds one's own, and send the other half."""
    steps = []
    distance = power // 2
    while distance:
        partner = rank ^ distance
        steps.append(Step(((partner, _half(partner, distance)),), ((partner, _half(rank, distance)),)))
        distance //= 2
    return tuple(steps)


def _half(rank: int, distance: int) -> tuple[int, ...]:
    """The aligned block of ``distance`` chunks that contains chunk ``rank``."""
    first = rank - rank % distance
    return tuple(range(first, first + distance))
