"""A schedule together with what a rank has to know of the others in order to follow it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from dynamiq_core import ConfigError
from dynamiq_transport import Schedule, ScheduleFunction, butterfly, check_schedule, direct, gain, ring

SCHEDULES: Mapping[str, ScheduleFunction] = MappingProxyType({"ring": ring, "butterfly": butterfly, "direct": direct})
"""Schedules that can be asked for by name."""


class Route(NamedTuple):
    """One rank's schedule, and what follows from those of all ranks.

    Attributes:
        schedule: the steps of this rank.
        owners: which rank completes each chunk, and so the slot of the chunk's last encoding.
        gain: mean number of gradients inside an encoded partial sum.
        name: the schedule's name and a digest of the steps of all ranks.
    """

    schedule: Schedule
    owners: tuple[int, ...]
    gain: float
    name: str

    @property
    def moved(self) -> float:
        """How many times its own d coordinates this rank sends: 2 (n - 1) / n for the ring."""
        steps = (*self.schedule.reduce, *self.schedule.gather)
        return sum(len(chunks) for step in steps for _, chunks in step.sends) / self.schedule.chunks


class _Survey(NamedTuple):
    owners: tuple[int, ...]
    gain: float
    name: str


def find_route(schedule: str | ScheduleFunction, rank: int, size: int) -> Route:
    """Resolve a schedule for one rank.

    Args:
        schedule: a name out of `SCHEDULES`, or a function ``(rank, size) -> Schedule``, which is proved right first.
        rank: this rank.
        size: number of ranks.

    Raises:
        ConfigError: no such schedule, or the function's schedules do not fit together.
    """
    function = find_function(schedule)
    survey = _survey(function, size)
    return Route(function(rank, size), *survey)


def quick_route(rank: int, size: int) -> Route:
    """The route of what is small: the statistics, whatever the schedule of the gradient, and small tensors.

    Its time goes to the number of messages in a row: two with the direct exchange, 2 log2 n with the butterfly,
    2 (n - 1) with the ring. The butterfly is taken where it is balanced, and keeps the number of peers small; for
    other numbers of ranks its proxies would send twice their share.
    """
    power_of_two = size & (size - 1) == 0
    return find_route("butterfly" if power_of_two else "direct", rank, size)


def find_function(schedule: str | ScheduleFunction) -> ScheduleFunction:
    """The function that a name stands for.

    Raises:
        ConfigError: no such schedule.
    """
    if callable(schedule):
        return schedule
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule cannot be {schedule!r}; allowed: {', '.join(SCHEDULES)}, or a function")
    return SCHEDULES[schedule]


@lru_cache(maxsize=256)
def _survey(function: ScheduleFunction, size: int) -> _Survey:
    try:
        if function not in SCHEDULES.values():
            check_schedule(function, size)
        schedules = [function(rank, size) for rank in range(size)]
        mean_gain = gain(function, size)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"schedule {function!r} is not sound for {size} ranks: {error}") from error
    owner = {chunk: schedule.rank for schedule in schedules for chunk in schedule.owned}
    digest = hashlib.blake2b(repr(schedules).encode(), digest_size=4).hexdigest()
    return _Survey(
        owners=tuple(owner[chunk] for chunk in range(schedules[0].chunks)),
        gain=mean_gain,
        name=f"{schedules[0].name} {digest}",
    )
