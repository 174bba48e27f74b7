"""What a compressor is to the code that moves its messages.

A multi-hop all-reduce treats a gradient of ``d`` coordinates as ``chunks`` parts. Every rank encodes every
chunk exactly once: its own gradient plus whatever messages it has received for that chunk until then. The
last encoding of a chunk is made by its owner, forwarded verbatim, and decoded by everybody, so that all ranks
end with the same bits. A codec supplies the arithmetic of those steps and knows nothing of ranks or networks.

Shapes: d coordinates, M statistics rows, K statistics per row, n workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dynamiq_core.errors import ConfigError


class Received(NamedTuple):
    """A message that arrived for a chunk, and the slot under which its sender encoded it."""

    message: Tensor
    slot: int


class Encoding(NamedTuple):
    """One encoding of a chunk that a rank has made: of its own gradient and what it had received.

    Attributes:
        chunk: which chunk.
        slot: under which it was encoded.
        received: what went in besides the gradient, in that order.
        message: what came out.
    """

    chunk: int
    slot: int
    received: Sequence[Received]
    message: Tensor


class Plan(Protocol):
    """What a codec decides before phase 2; the same on every rank."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each chunk's message has, a function of (d, n, config) alone."""


P = TypeVar("P", bound=Plan)


class Codec(ABC, Generic[P]):
    """Compressor for a multi-hop all-reduce.

    Tensors named ``x`` are contiguous, one-dimensional, float32, bfloat16 or float16, of d coordinates, and are
    never written. Messages are contiguous uint8 tensors of ``plan.sizes[chunk]`` bytes on the device of ``x``.
    No method reads a device value on the host.
    """

    @abstractmethod
    def fingerprint(self) -> str:
        """Everything that must be equal on all ranks, as one line of text."""

    def statistics(self, x: Tensor) -> Tensor | None:
        """Phase 1: rows of this rank's ``x``, bfloat16 [M, K] contiguous; None when the codec needs none."""
        return None

    def merge_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Combine the rows of several ranks into one tensor of the same shape.

        Args:
            parts: bfloat16 [m, K] each.

        Raises:
            TypeError: the codec exchanges no statistics.
        """
        raise TypeError(f"{type(self).__name__} exchanges no statistics")

    @abstractmethod
    def plan(
        self,
        statistics: Tensor | None,
        numel: int,
        *,
        device: torch.device,
        workers: int,
        chunks: int,
        step: int = 0,
        bucket: int = 0,
        gain: float | None = None,
    ) -> P:
        """Derive the plan of one all-reduce from the merged statistics.

        Args:
            statistics: bfloat16 [M, K], merged over all workers, bit-identical on every rank; or None.
            numel: number of coordinates d.
            device: where the tensors live.
            workers: number of ranks n.
            chunks: number of chunks of the schedule.
            step: training step; with ``bucket`` and the codec's seed it keys the random numbers.
            bucket: index of the bucket within the step.
            gain: error of the final sum relative to n quantisations of one gradient each (the mean number of
                gradients inside an encoded partial sum, and of encodings that a gradient passes); the ring's
                (n + 1) / 2 when None.
        """

    @abstractmethod
    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: P,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop: encode the chunk of ``x`` plus every received message, in the order given, under ``slot``.

        Args:
            received: messages of this chunk with their senders' slots.
            x: this rank's gradient [d].
            plan: of this all-reduce.
            chunk: which chunk.
            slot: of this encoding, used by no other one of the chunk.
            out: uint8 [plan.sizes[chunk]] to write into; a new tensor when None.
        """

    def compress(self, x: Tensor, plan: P, *, chunk: int, slot: int, out: Tensor | None = None) -> Tensor:
        """Encode the chunk of ``x`` alone; arguments as in `decompress_accumulate_recompress`."""
        return self.decompress_accumulate_recompress((), x, plan, chunk=chunk, slot=slot, out=out)

    @abstractmethod
    def decompress(self, message: Tensor, plan: P, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """Write the mean over the workers of the chunk's coordinates into ``out`` [d]; other chunks stay.

        Args:
            message: the chunk's last encoding.
            plan: of this all-reduce.
            chunk: which chunk.
            slot: under which the message was encoded.
            out: written in place.
        """

    def residual(self, encodings: Sequence[Encoding], x: Tensor, plan: P) -> Tensor:
        """What a rank's own encodings of one all-reduce lost: float32 [d], what went in minus what the messages carry.

        Its sum over the ranks is exactly what the sum of the gradients lost on its way through all hops, so a rank that
        adds its own part to its next gradient makes up for it (error feedback). A codec need not offer this.

        Args:
            encodings: at most one for each chunk; coordinates of other chunks come out as 0.
            x: the gradient that was encoded, [d].
            plan: of that all-reduce.

        Raises:
            ConfigError: this codec does not offer it.
        """
        raise ConfigError(f"{self!r} cannot tell what its encodings lose; allowed for error feedback: a codec that can")
