"""What a transport is: contiguous bytes go from rank to rank, in batches, and nothing else is known of them.

Shapes: every message is one contiguous uint8 tensor of any shape; only its number of bytes matters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

DEFAULT_TIMEOUT = 600.0
"""Seconds that a wait lasts at most when nothing else is said."""

Message = tuple[int, Tensor]
"""The peer's rank in the transport's group, and the bytes for it or the place for the bytes from it."""


class TransportError(RuntimeError):
    """A peer died, stalled, or sent something else than was expected.

    The transport that raised it is closed: what was in flight is lost, and a new group is needed to go on.

    Attributes:
        peers: ranks, in the transport's group, whose messages did not come through. A peer that is named may itself
            have waited for another one.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class Handle(ABC):
    """One batch in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Return when every message of the batch has been sent or received; a second call gives the same answer.

        For CPU tensors the call blocks: afterwards received bytes can be read, and sent buffers reused. For CUDA
        tensors it only makes the current stream wait, as torch's own asynchronous operations do.

        Raises:
            TransportError: a message did not come through within the transport's timeout.
        """


class Transport(ABC):
    """Moves bytes between the ``size`` ranks of a group.

    Usable as a context manager that closes at the end, and aborts when an exception passes through. An instance
    belongs to one thread at a time, since batches are matched by the order in which they are posted.

    Attributes:
        rank: this process's rank in the transport's own group.
        size: number of ranks in that group.
        posts_ahead: whether receives of CPU tensors may be posted in a batch of their own before the sends that the
            peers wait for. Not where batches are carried out one after the other, as on a stream: all ranks would wait
            in the first. False unless a transport says otherwise; one that does has an `abort` that does not wait.
    """

    rank: int
    size: int
    posts_ahead: bool = False

    @abstractmethod
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        """Post all sends and receives as one batch and return at once.

        The messages from one rank to another are matched in the order of their posting, within a batch and across
        batches. Both sides know the size beforehand; zero bytes and empty batches are legal. The buffers must stay
        as they are until ``Handle.wait()`` has returned; they are kept alive until then.

        Args:
            sends: (destination rank, contiguous uint8 tensor) of each message to send.
            recvs: (source rank, contiguous uint8 tensor to fill) of each message to receive.

        Raises:
            ValueError: a peer out of range or equal to ``rank``, or a tensor that is not contiguous uint8; nothing
                has been posted.
            TransportError: the transport is closed or has failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was posted and never waited for, and release what the transport holds; may be repeated.

        Raises:
            TransportError: a message that was never waited for did not come through.
        """

    def abort(self) -> None:
        """Leave without finishing anything, because something went wrong on this rank; may be repeated."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


def check_batch(transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
    """Refuse a batch that no transport could carry; implementations call it before they post anything.

    Raises:
        ValueError: see `Transport.exchange`.
    """
    for verb, messages in (("send to", sends), ("receive from", recvs)):
        for peer, tensor in messages:
            if not 0 <= peer < transport.size or peer == transport.rank:
                others = f"the other ranks of 0..{transport.size - 1}" if transport.size > 1 else "none (size 1)"
                raise ValueError(f"rank {transport.rank} cannot {verb} rank {peer}; allowed: {others}")
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
                layout = "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"
                raise ValueError(
                    f"rank {transport.rank} cannot {verb} rank {peer} a tensor of {tensor.dtype}, {layout}, shape "
                    f"{tuple(tensor.shape)}; allowed: contiguous torch.uint8"
                )


def check_timeout(timeout: float) -> float:
    """Refuse a timeout that is no positive number of seconds, and return it.

    Raises:
        ValueError: it is not.
    """
    if not timeout > 0:
        raise ValueError(f"timeout cannot be {timeout}; allowed: seconds above 0")
    return timeout
