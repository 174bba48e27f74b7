"""What can go wrong between ranks; each of these is also a `DynamiQError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamiq_core import DynamiQError
from dynamiq_transport import TransportError


class ConfigMismatchError(DynamiQError, RuntimeError):
    """The ranks were about to do different things. Raised on all of them, before anything was sent or changed.

    Attributes:
        differences: for every fact that differs, what each rank holds, in rank order.
    """

    def __init__(self, message: str, differences: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.differences = differences


class CommunicationError(DynamiQError, TransportError):
    """A peer died, stalled, or sent something that does not belong here. The tensor is as it was before.

    Attributes:
        peers: ranks, in the transport's group, whose messages did not come through or were wrong.
        step: training step of the all-reduce.
        bucket: bucket of the all-reduce within the step.
    """

    def __init__(self, reason: str, peers: Sequence[int] = (), *, step: int, bucket: int) -> None:
        super().__init__(f"all-reduce of step {step}, bucket {bucket}: {reason}", peers)
        self.step = step
        self.bucket = bucket


def first_cause(errors: Iterable[Exception]) -> Exception:
    """Of the errors that several lanes have met, one that the others may have followed from.

    A rank that has met anything leaves all lanes, so that on another lane its peers see no more than that it is gone.
    """
    return min(errors, key=_remoteness)


def _remoteness(error: Exception) -> int:
    if isinstance(error, ConfigMismatchError):
        return 0
    # Who complains of a message that came has no cause for it but the message.
    lost = isinstance(error, TransportError) and (
        not isinstance(error, CommunicationError) or isinstance(error.__cause__, TransportError)
    )
    return 2 if lost else 1


class ReplicaError(DynamiQError, RuntimeError):
    """Ranks ended an all-reduce with different bits, which a codec must never let happen."""
