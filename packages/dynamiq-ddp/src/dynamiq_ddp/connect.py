"""Makes the lanes of a state: process groups of its own, so that its messages never mix with the user's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dynamiq_core import ConfigError, InputError
from dynamiq_transport import TorchTransport, Transport, TransportError

from .engine import compare_ranks
from .errors import CommunicationError, ConfigMismatchError
from .lanes import Lanes
from .meter import Meter
from .probe import probe, remember

LANES = {"cpu": 2, "cuda": 1}
"""How many, if nothing else is said. On CPU one computes while another waits for the network; on CUDA one does both."""

Ranks = dist.ProcessGroup | Callable[[], Transport]
"""Over whom to average: a group beside which new ones are made, or a function that makes a transport."""


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        ConfigError: there is none yet.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ConfigError("there is no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def connect(
    ranks: Ranks, *, number: int | None, timeout: float, device: torch.device, step: int, measured: bool = False
) -> Lanes:
    """Make lanes with a transport each; all ranks do so at the same time, in the same order.

    Args:
        ranks: over whom.
        number: of lanes; when None, see `LANES`.
        timeout: seconds to wait for another rank.
        device: where gradients live.
        step: for errors.
        measured: whether to measure the network, on the first lane and for all of them.

    Raises:
        InputError: gradients are on a device of another kind than CPU or CUDA.
        ConfigError: no transport can be made of what was given.
        ConfigMismatchError: the ranks want different numbers of lanes, different timeouts, or not all to measure.
        CommunicationError: a rank did not come.
    """
    if device.type not in LANES:
        raise InputError(f"gradients cannot be on {device}; allowed: {' and '.join(LANES)} devices")
    number = number or LANES[device.type]
    transports: list[Transport] = []
    try:
        for _ in range(number):
            transports.append(_transport(ranks, timeout))
            if len(transports) == 1:  # all ranks make the next ones, or none does
                facts = {"lanes": number, "timeout": timeout, "measures the network": measured}
                compare_ranks(facts, transports[0], device, Meter(), step=step, bucket=0)
        lanes = Lanes(transports)
        if measured:
            link = probe(transports[0], device, lanes.lanes[0].meter)
            for transport in transports:
                remember(transport, link)
        return lanes
    except BaseException as error:
        for transport in transports:
            # Of a disagreement every rank has heard, or is about to, from messages that must still arrive.
            transport.close() if isinstance(error, ConfigMismatchError) else transport.abort()
        if isinstance(error, TransportError) and not isinstance(error, CommunicationError):
            raise CommunicationError(str(error), error.peers, step=step, bucket=0) from error
        if isinstance(error, (ValueError, TypeError)):
            raise ConfigError(f"no transport can be made: {error}") from error
        raise


def _transport(ranks: Ranks, timeout: float) -> Transport:
    if isinstance(ranks, dist.ProcessGroup):
        return TorchTransport.dedicated(ranks, timeout=timeout)
    return ranks()
