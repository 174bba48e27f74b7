"""A batch of messages on torch.distributed, as far as the waiting for it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

TAGS = (1 << 31) - 2
"""Tags are non-negative 32-bit integers; the two highest are not for messages."""
PROBE = 0.001
"""Seconds to wait for something that is there or is not; zero would mean the group's own timeout."""


class Failure(NamedTuple):
    """A message that did not come through.

    Attributes:
        peer: the other rank, in the group.
        reason: what could not be done, in words; it keeps nothing alive.
    """

    peer: int
    reason: str


class Operation(dist.P2POp):
    """One message of a batch, addressed by its rank in the group.

    The base class looks the peer up in torch's table of groups. A group made by hand, as for ranks that are threads or
    for elastic training, is not in that table, and sending needs nothing but the rank inside the group.
    """

    def __init__(self, verb: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, peer: int) -> None:
        self.op = verb
        self.tensor = tensor
        self.group = group
        self.peer = self.group_peer = peer
        self.tag = tensor.numel() % TAGS

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)


class Part:
    """What one ``Work`` stands for: one message, or the whole batch where the backend posts it as one call."""

    def __init__(self, work: dist.Work, operations: Sequence[dist.P2POp]) -> None:
        self.work = work
        self.operations = operations

    @property
    def sends(self) -> bool:
        return all(operation.op is dist.isend for operation in self.operations)

    @property
    def on_cuda(self) -> bool:
        return self.operations[0].tensor.is_cuda

    def wait(self, seconds: float) -> None:
        if self.on_cuda:
            self.work.wait()  # only orders the stream; a timeout would block the host
        else:
            self.work.wait(timedelta(seconds=seconds))


class Wait:
    """One wait for parts of batches, one after the other.

    Args:
        parts: what to wait for.
        timeout: seconds for all of them together.

    Attributes:
        at: number of the part that is being waited for.
    """

    def __init__(self, parts: Sequence[Part], timeout: float) -> None:
        self.parts = parts
        self.at = 0
        self._timeout = timeout

    def run(self) -> list[Failure]:
        """Wait for everything; what did not come through, in which nothing keeps the group alive."""
        deadline = time.monotonic() + self._timeout
        failures: list[Failure] = []
        for number, part in enumerate(self.parts):
            self.at = number
            try:
                # After a failure only look at the rest, to name every peer that is not there.
                part.wait(PROBE if failures else max(PROBE, deadline - time.monotonic()))
            except RuntimeError as error:
                failures += (failure(operation, error) for operation in part.operations)
        return failures


def failure(operation: dist.P2POp, error: RuntimeError) -> Failure:
    """What is kept of an error."""
    verb = "send to" if operation.op is dist.isend else "receive from"
    peer = operation.group_peer
    return Failure(peer, f"{verb} rank {peer} {operation.tensor.numel()} bytes: {error}")
