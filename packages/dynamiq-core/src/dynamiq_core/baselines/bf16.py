"""Half the bytes of float32 by rounding: the simplest codec there is, and the one that others are measured against.

Shapes: d coordinates, C chunks, n workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.errors import InputError
from dynamiq_core.protocol import Codec, Received


class RangePlan(NamedTuple):
    """Chunks that are contiguous ranges of coordinates, each with messages of a fixed size per coordinate.

    Attributes:
        workers: number of ranks n.
        bounds: first coordinate of every chunk, then d; C + 1 values.
        itemsize: bytes of a coordinate in a message.
    """

    workers: int
    bounds: tuple[int, ...]
    itemsize: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each chunk's message has."""
        return tuple((end - start) * self.itemsize for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def part(self, x: Tensor, chunk: int) -> Tensor:
        """The chunk's coordinates of ``x`` [d], as a view."""
        return x[self.bounds[chunk] : self.bounds[chunk + 1]]


def range_plan(numel: int, *, workers: int, chunks: int, itemsize: int) -> RangePlan:
    """Split d coordinates into C ranges that differ by at most one in length.

    >>> range_plan(10, workers=4, chunks=4, itemsize=2).bounds
    (0, 2, 5, 7, 10)

    Raises:
        InputError: an argument is not positive.
    """
    if numel < 1 or workers < 1 or chunks < 1:
        raise InputError(f"numel, workers and chunks must be positive, not {numel}, {workers} and {chunks}")
    return RangePlan(workers, tuple(numel * chunk // chunks for chunk in range(chunks + 1)), itemsize)


class BF16(Codec[RangePlan]):
    """bfloat16 messages, rounded to nearest even at every hop; sums are taken in float32, and nothing is random.

    What DDP's ``bf16_compress_hook`` sends, with the rounding where a multi-hop all-reduce puts it.

    Example:
        >>> import torch
        >>> codec = BF16()
        >>> x = torch.tensor([1.0, 2.5, -3.0])
        >>> plan = codec.plan(None, 3, device=x.device, workers=1, chunks=1)
        >>> message = codec.compress(x, plan, chunk=0, slot=0)
        >>> message.numel(), codec.decompress(message, plan, chunk=0, slot=0, out=torch.empty(3)).tolist()
        (6, [1.0, 2.5, -3.0])
    """

    def __repr__(self) -> str:
        return "BF16()"

    def fingerprint(self) -> str:
        """Its name: there is nothing to configure."""
        return "bf16"

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
    ) -> RangePlan:
        """Contiguous ranges; arguments as in `Codec.plan`, most of them without influence.

        Raises:
            InputError: an argument is out of range.
        """
        return range_plan(numel, workers=workers, chunks=chunks, itemsize=2)

    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: RangePlan,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop, as in `Codec.decompress_accumulate_recompress`; all slots are alike."""
        total = plan.part(x, chunk).to(torch.float32, copy=True)
        for message, _ in received:
            total += message.view(torch.bfloat16)
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        out.view(torch.bfloat16).copy_(total)
        return out

    def decompress(self, message: Tensor, plan: RangePlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """The chunk's coordinates of ``out`` [d] become the mean; see `Codec.decompress`."""
        plan.part(out, chunk).copy_(message.view(torch.bfloat16).to(torch.float32) / plan.workers)
        return out
