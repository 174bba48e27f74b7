"""A schedule together with what a rank has to know of the others in order to follow it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from dynamiq_core import ConfigError
from dynamiq_transport import (
    Hierarchical,
    Link,
    Schedule,
    ScheduleFunction,
    butterfly,
    check_schedule,
    choose,
    common_gain,
    direct,
    gain,
    hierarchical,
    levels,
    ring,
)

SCHEDULES: Mapping[str, ScheduleFunction] = MappingProxyType({"ring": ring, "butterfly": butterfly, "direct": direct})
"""Schedules that can be asked for by name."""

AUTO = "auto"
"""Asks for one of them by its time, as measured numbers of the network predict it."""

ScheduleChoice = str | ScheduleFunction | Hierarchical
"""``"ring"``, ``"butterfly"``, ``"direct"``, ``"auto"``, a function, ``hierarchical(8)``, or as text
``"hierarchical:8"`` and ``"hierarchical:8:butterfly"``."""


class Route(NamedTuple):
    """One rank's schedule, and what follows from those of all ranks that take part.

    Attributes:
        schedule: the steps of this rank, in which those that take part are numbered from 0.
        ranks: what they are in the transport.
        owners: which of them completes each chunk, and so the slot of the chunk's last encoding.
        gain: mean number of gradients inside an encoded partial sum.
        growth: by how much the error is larger if all gradients are the same.
        name: the schedule's name and a digest of all steps.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    gain: float
    growth: float
    name: str

    @property
    def moved(self) -> float:
        """How many times its own d coordinates this rank sends: 2 (n - 1) / n for the ring."""
        steps = (*self.schedule.reduce, *self.schedule.gather)
        return sum(len(chunks) for step in steps for _, chunks in step.sends) / self.schedule.chunks


class NodeRoute(NamedTuple):
    """A route of two levels; see `dynamiq_transport.hierarchical`.

    Attributes:
        inside: over the ranks of this node, at full precision.
        between: over the ranks that own the same part in all nodes.
    """

    inside: Route
    between: Route | NodeRoute

    @property
    def name(self) -> str:
        """Of both levels."""
        return f"nodes of {self.inside.schedule.size}, between them {self.between.name}"


class _Survey(NamedTuple):
    owners: tuple[int, ...]
    gain: float
    growth: float
    name: str


def find_route(
    schedule: ScheduleChoice, rank: int, size: int, *, link: Link | None = None, nbytes: float = 0.0
) -> Route | NodeRoute:
    """Resolve a schedule for one rank.

    Args:
        schedule: see `find_schedule`; a function is proved right first.
        rank: this rank.
        size: number of ranks.
        link: measured numbers of the network, the same on all ranks; what ``"auto"`` decides by.
        nbytes: of the gradient as it travels in one direction; likewise.

    Raises:
        ConfigError: no such schedule, it does not fit the number of ranks, or the function's schedules do not fit
            together.
    """
    return _resolve(find_schedule(schedule), rank, tuple(range(size)), link, nbytes)


FEW = 4
"""Up to so many ranks the direct exchange has hardly more messages than the butterfly, and fewer in a row."""


def quick_schedule(size: int) -> ScheduleFunction:
    """The schedule of what is small: the statistics, whatever the schedule of the gradient, and small tensors.

    Its time goes to the number of messages in a row: two with the direct exchange, 2 log2 n with the butterfly,
    2 (n - 1) with the ring. The butterfly keeps the number of peers small. It is taken where they would be many and it
    is balanced; for numbers of ranks that are no power of two its proxies would send twice their share.

    Args:
        size: how many take part.
    """
    balanced = size & (size - 1) == 0
    return butterfly if balanced and size > FEW else direct


def quick_route(rank: int, size: int, ranks: tuple[int, ...] | None = None) -> Route:
    """The route by `quick_schedule`.

    Args:
        rank: this rank among those that take part.
        size: how many take part.
        ranks: what they are in the transport; the same numbers when None.
    """
    return _flat(quick_schedule(size), rank, tuple(range(size)) if ranks is None else ranks)


def find_schedule(schedule: ScheduleChoice) -> ScheduleFunction | Hierarchical | None:
    """What a name stands for: None for ``"auto"``, which is decided by the size of a message.

    Raises:
        ConfigError: no such schedule, or nodes of no such size.
    """
    if isinstance(schedule, str):
        return _named(schedule)
    if isinstance(schedule, Hierarchical):
        if isinstance(schedule.node_size, bool) or not isinstance(schedule.node_size, int) or schedule.node_size < 1:
            raise ConfigError(f"node_size cannot be {schedule.node_size!r}; allowed: an integer of at least 1")
        find_schedule(schedule.between)
        return schedule
    if callable(schedule) and isinstance(schedule, Hashable):  # what is found out about it is kept
        return schedule
    raise _unknown(schedule)


def measures(schedule: ScheduleChoice) -> bool:
    """Whether a schedule is decided by measured numbers of the network."""
    found = find_schedule(schedule)
    return found is None or (isinstance(found, Hierarchical) and measures(found.between))


def _named(name: str) -> ScheduleFunction | Hierarchical | None:
    kind, *words = name.split(":")
    if kind == "hierarchical" and len(words) in (1, 2):
        node_size = int(words[0]) if words[0].isascii() and words[0].isdecimal() else words[0]
        found = find_schedule(hierarchical(node_size, **dict(zip(["between"], words[1:], strict=False))))  # type: ignore[arg-type]
        return found
    if name != AUTO and name not in SCHEDULES:
        raise _unknown(name)
    return None if name == AUTO else SCHEDULES[name]


def _unknown(schedule: object) -> ConfigError:
    names = ", ".join([*SCHEDULES, AUTO, "hierarchical:NODE_SIZE", "hierarchical:NODE_SIZE:BETWEEN"])
    others = "" if isinstance(schedule, str) else ", hierarchical(node_size), or a hashable function"
    return ConfigError(f"schedule cannot be {schedule!r}; allowed: {names}{others}")


def _resolve(
    schedule: ScheduleFunction | Hierarchical | None,
    rank: int,
    ranks: tuple[int, ...],
    link: Link | None,
    nbytes: float,
) -> Route | NodeRoute:
    """For rank number ``rank`` among ``ranks``."""
    size = len(ranks)
    if schedule is None:
        if link is None:
            raise ConfigError("schedule 'auto' needs measured numbers of the network")
        schedule = choose(nbytes, size, link)
    if not isinstance(schedule, Hierarchical):
        return _flat(schedule, rank, ranks)
    m = schedule.node_size
    try:
        inner, outer = levels(rank, size, m)
    except ValueError as error:
        raise ConfigError(f"schedule {schedule!r} does not fit: {error}") from error
    between = _resolve(
        find_schedule(schedule.between), rank // m, tuple(ranks[peer] for peer in outer), link, nbytes / m
    )
    if m == 1:
        return between
    return NodeRoute(_flat(direct, rank % m, tuple(ranks[peer] for peer in inner)), between)


def _flat(function: ScheduleFunction, rank: int, ranks: tuple[int, ...]) -> Route:
    survey = _survey(function, len(ranks))
    return Route(function(rank, len(ranks)), ranks, *survey)


@lru_cache(maxsize=256)
def _survey(function: ScheduleFunction, size: int) -> _Survey:
    try:
        if function not in SCHEDULES.values():
            check_schedule(function, size)
        schedules = [function(rank, size) for rank in range(size)]
        mean_gain, mean_square = gain(function, size), common_gain(function, size)
    except Exception as error:  # whatever a user's function raises, for the other ranks have to be told
        raise ConfigError(f"schedule {function!r} is not sound for {size} ranks: {error}") from error
    owner = {chunk: schedule.rank for schedule in schedules for chunk in schedule.owned}
    digest = hashlib.blake2b(repr(schedules).encode(), digest_size=4).hexdigest()
    return _Survey(
        owners=tuple(owner[chunk] for chunk in range(schedules[0].chunks)),
        gain=mean_gain,
        growth=mean_square / mean_gain,
        name=f"{schedules[0].name} {digest}",
    )
