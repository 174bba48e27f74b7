"""What an all-reduce costs on a given network, for more ranks than one has: real plans, and the transport's cost model.

    time = statistics + codec + gradient

Statistics and gradient travel by the models of `dynamiq_transport.cost`, with the bytes that the engine would send:
every chunk's message as the codec's plan sizes it, and its header. The codec takes what was measured on one rank, which
does not depend on the number of ranks: on every schedule a rank encodes and decodes each coordinate once or so.
Nothing overlaps here, so a real step, in which the codec of one bucket runs beside the network of another, is faster.

Shapes: n ranks, d coordinates, C chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, ConfigError
from dynamiq_transport import Link, ScheduleFunction
from dynamiq_transport.cost import SECONDS, ring_seconds

from .frames import HEADER
from .route import SCHEDULES, quick_schedule


class Traffic(NamedTuple):
    """Bytes that all chunks together have in one direction, headers included.

    Attributes:
        gradient: of phase 2.
        statistics: of phase 1.
    """

    gradient: int
    statistics: int


class Projection(NamedTuple):
    """Seconds of one all-reduce.

    Attributes:
        statistics: on the network, for phase 1.
        gradient: on the network, for phase 2.
        codec: on the rank.
    """

    statistics: float
    gradient: float
    codec: float

    @property
    def total(self) -> float:
        """One after the other."""
        return self.statistics + self.gradient + self.codec


def traffic(codec: Codec[Any], statistics: Tensor | None, numel: int, *, schedule: str, ranks: int) -> Traffic:
    """What the engine would send for d coordinates.

    Args:
        codec: which.
        statistics: of any gradient of d coordinates; messages have the same size whatever the values.
        numel: number of coordinates d.
        schedule: its name.
        ranks: how many, n.

    Raises:
        ConfigError: no such schedule.
    """
    chunks = flat_schedule(schedule)(0, ranks).chunks
    plan = codec.plan(statistics, numel, device=torch.device("cpu"), workers=ranks, chunks=chunks)
    small = 0
    if statistics is not None:
        small = statistics.numel() * statistics.element_size() + HEADER * quick_schedule(ranks)(0, ranks).chunks
    return Traffic(sum(plan.sizes) + HEADER * chunks, small)


def project(sent: Traffic, *, schedule: str, ranks: int, link: Link, codec_seconds: float) -> Projection:
    """The time of one all-reduce.

    Args:
        sent: as `traffic` says.
        schedule: its name.
        ranks: how many, n.
        link: the network.
        codec_seconds: of one rank, for the whole gradient.

    Raises:
        ConfigError: no such schedule.
    """
    function = flat_schedule(schedule)
    statistics = SECONDS[quick_schedule(ranks)](sent.statistics, ranks, link) if sent.statistics else 0.0
    return Projection(statistics, SECONDS[function](sent.gradient, ranks, link), codec_seconds)


def stock_seconds(numel: int, *, ranks: int, link: Link, bits: float = 32) -> float:
    """A ring without a codec, which is what libraries use where bandwidth counts; the yardstick."""
    return ring_seconds(numel * bits / 8, ranks, link)


def break_even(numel: int, *, ranks: int, bits: float, codec_seconds: float, stock_bits: float = 32) -> float:
    """Bytes per second of a rank's connection below which fewer bits pay, where bandwidth is all that counts.

    A ring moves ``2 (n - 1) / n`` times the gradient. What it saves in bytes has to take longer than the codec.

    Args:
        numel: number of coordinates d.
        ranks: how many, n.
        bits: on the wire per coordinate.
        codec_seconds: for d coordinates.
        stock_bits: of the all-reduce that it is compared with.
    """
    saved = 2 * (ranks - 1) / ranks * numel * (stock_bits - bits) / 8
    return max(saved, 0.0) / codec_seconds if codec_seconds else float("inf")


def flat_schedule(name: str) -> ScheduleFunction:
    """A schedule of one level, of which there is a model.

    Raises:
        ConfigError: no such schedule.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule cannot be {name!r}; allowed: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
