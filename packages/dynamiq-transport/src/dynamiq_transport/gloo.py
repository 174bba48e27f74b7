"""What Gloo leaves undone when a peer goes away, and how it is made up for.

Gloo tells an operation that its peer is gone only if nothing of the message has moved. One whose bytes are on their
way, or wait to be written to the socket, is forgotten (``Pair::signalException`` in Gloo's ``tcp/pair.cc`` walks the
pending operations, not those under way) and ends by its timeout. Nothing but that timeout can end the wait, and a wait
that times out closes all connections of the group. So somebody else waits, and the one who needs the outcome looks
after the peer meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq_transport.batch import PROBE, TAGS, Failure, Part, Wait, failure
from dynamiq_transport.worker import Worker

LOOK = 1.0
"""Seconds between two looks at a peer that keeps this rank waiting."""

SAMPLES = 4096
"""Bytes of a message by which is seen whether it is coming in."""

_under_way: set[Wait] = set()


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether messages on CPU go by Gloo, where each is an operation of its own."""
    return backend_for(group, "cpu") == "gloo"


def backend_for(group: dist.ProcessGroup, kind: str) -> str | None:
    """Name of what carries messages on devices of a kind, such as cuda, in a group; None where nothing does."""
    device = torch.device(kind)
    return group._get_backend(device).name().lower() if device in group._device_types else None


def gone(operation: dist.P2POp) -> RuntimeError | None:
    """The error if the connection to an operation's peer is known to be closed.

    A connection that stands carries 40 bytes more, which nobody waits for.
    """
    try:
        empty = torch.empty(0, dtype=torch.uint8)
        dist.isend(empty, group=operation.group, group_dst=operation.group_peer, tag=TAGS)
    except RuntimeError as error:
        return error.with_traceback(None)
    return None


def hang_up(group: dist.ProcessGroup) -> None:
    """Close the connections of a group, whoever still holds it, so that the peers hear of it at once."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # either it is closed, or it is closed by this wait, with all others
                never = group.recv([torch.empty(1, dtype=torch.uint8)], peer, TAGS + 1)
                never.wait(timedelta(seconds=PROBE))


class Waiter:
    """Waits for operations of one group in a thread of its own.

    The thread stays behind where it waits for a peer that is gone; the operation's timeout ends it.
    """

    def __init__(self) -> None:
        self._worker = Worker("dynamiq waiter")

    def wait(self, wait: Wait) -> list[Failure]:
        """Let the thread wait, and return what failed as soon as it is known."""
        ended = threading.Lock()
        ended.acquire()
        failures: list[Failure] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                failures.extend(wait.run())
            except BaseException as error:  # belongs to whoever waits for this thread
                errors.append(error)
            finally:
                _under_way.discard(wait)
                ended.release()

        _under_way.add(wait)
        self._worker.submit(run)
        before: tuple[Part | None, list[Tensor]] = None, []
        suspect: Part | None = None
        while not ended.acquire(timeout=LOOK):
            left = wait.parts[wait.at :]
            if not left:  # let go of meanwhile
                return []
            part, landed = left[0], _sample(left[0])
            moving = part is not before[0] or not all(map(torch.equal, landed, before[1]))
            before = part, landed
            # To look is to write. That of a peer which has sent the rest and left would make its system drop the rest.
            missing = [] if moving and landed else _missing(part)
            # Twice, as all of the message may have come, and the thread not have been told yet.
            if missing and part is suspect:
                return missing + [each for other in left[1:] for each in _missing(other)]
            suspect = part if missing else None
        if errors:
            raise errors[0]
        return failures

    def stop(self) -> None:
        """End the thread after what it is doing; may be repeated."""
        self._worker.stop()


def _sample(part: Part) -> list[Tensor]:
    """A copy of some of what has been received so far; empty for what is sent."""
    landings = [operation.tensor.view(-1) for operation in part.operations if operation.op is not dist.isend]
    return [landing[:: max(1, landing.numel() // SAMPLES)].clone() for landing in landings]


def _missing(part: Part) -> list[Failure]:
    errors = [(operation, gone(operation)) for operation in part.operations]
    return [failure(operation, error) for operation, error in errors if error is not None]


def _end() -> None:
    """End the waits that closing the connections can end, such as one that was interrupted.

    A thread that comes back from C++ to an interpreter that is ending takes the process down with it.
    """
    for part in [part for wait in tuple(_under_way) for part in wait.parts[wait.at : wait.at + 1]]:
        hang_up(part.operations[0].group)
    deadline = time.monotonic() + LOOK
    while _under_way and time.monotonic() < deadline:
        time.sleep(PROBE)


weakref.finalize(Waiter, _end)  # at the end of the interpreter, after all finalizers that are made later
