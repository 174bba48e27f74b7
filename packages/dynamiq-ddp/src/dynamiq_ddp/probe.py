"""What ``"auto"`` decides by: numbers of the network, measured once for a transport, and the size of a message."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dynamiq_core import Codec
from dynamiq_transport import Link, Transport, explain, measure

from .meter import Meter, MeteredTransport

REPEATS = 5
"""Of each of the three measurements; about 25 MB travel from every rank to the next."""

TABLE = (1e4, 1e5, 1e6, 1e7, 1e8)
"""Bytes of the messages in the table that is logged."""

_SAMPLE = 1 << 14
_LOGGER = logging.getLogger("dynamiq_ddp")
_per_coordinate: dict[tuple[str, torch.device], float] = {}


def known_link(transport: Transport) -> Link | None:
    """The numbers that `probe` has found for this transport, or that `remember` was given."""
    link: Link | None = vars(transport).get("_dynamiq_link")
    return link


def remember(transport: Transport, link: Link) -> None:
    """Keep numbers with a transport, for as long as it lives."""
    vars(transport)["_dynamiq_link"] = link


def probe(transport: Transport, device: torch.device, meter: Meter) -> Link:
    """Measure the network once, keep the numbers with the transport, and log what they make ``"auto"`` choose.

    Collective. The numbers are the same on every rank, and so is every choice that follows from them.

    Raises:
        TransportError: a rank did not take part.
    """
    link = measure(MeteredTransport(transport, meter, "probe"), device=device, repeats=REPEATS)
    remember(transport, link)
    if transport.rank == 0:
        _LOGGER.info("schedule 'auto' among %s", explain(TABLE, transport.size, link))
    return link


def bytes_of(codec: Codec[Any], numel: int, device: torch.device) -> float:
    """Bytes of a whole gradient as it travels in one direction of phase 2.

    That is a function of the codec's configuration and of the number of coordinates, which every plan has to follow, so
    a plan for zeros tells.
    """
    key = (codec.fingerprint(), device)
    if key not in _per_coordinate:
        zeros = torch.zeros(_SAMPLE, device=device)
        plan = codec.plan(codec.statistics(zeros), _SAMPLE, device=device, workers=1, chunks=1)
        _per_coordinate[key] = sum(plan.sizes) / _SAMPLE
    return _per_coordinate[key] * numel
