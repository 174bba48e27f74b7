"""What is too small or of too rare a kind to be compressed goes through the same engine, uncompressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamiq_core import Codec, Received
from dynamiq_core.baselines.bf16 import RangePlan, range_plan


class Exact(Codec[RangePlan]):
    """Messages are partial sums, in float32 or in the tensor's own dtype where that holds more.

    Unlike the codecs that compress, it takes tensors of every floating-point or complex dtype.

    Args:
        dtype: of the tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.sums = torch.promote_types(dtype, torch.float32)

    def __repr__(self) -> str:
        return f"Exact({self.sums})"

    def fingerprint(self) -> str:
        """The dtype of the sums."""
        return f"exact {self.sums}"

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
        """Contiguous ranges; see `Codec.plan`."""
        return range_plan(numel, workers=workers, chunks=chunks, itemsize=self.sums.itemsize)

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
        """Add up; see `Codec.decompress_accumulate_recompress`."""
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        total = out.view(self.sums)
        total.copy_(plan.part(x, chunk))
        for message, _ in received:
            total += message.view(self.sums)
        return out

    def decompress(self, message: Tensor, plan: RangePlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """The chunk's coordinates of ``out`` become the mean; see `Codec.decompress`."""
        plan.part(out, chunk).copy_(message.view(self.sums) / plan.workers)
        return out
