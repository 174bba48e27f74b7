"""Block sparsification: the blocks that matter are sent as they are, and the others not at all.

Source: Fei, Ho, Sahu, Canini and Sapio, "Efficient Sparse Collective Communication and its application to Accelerate
Distributed Deep Learning" (OmniReduce), SIGCOMM 2021, with its block-wise top-k sparsification.

What a multi-hop all-reduce at a given budget makes different from the source:

* The source's aggregator asks for the blocks that are not zero on any rank, and every rank chooses its own ones. Here
  all ranks have to send the same blocks, as a partial sum needs all of its parts: those with the largest root of the
  squared norms summed over the ranks. It travels as a statistic, 1/16 of a bit per coordinate.
* How many are sent follows from the budget alone, so that all messages have a size known in advance.
* Entries travel in bfloat16, rounded to nearest even at every hop. In float32 half as many blocks would be sent, with
  an error that is not what limits this method.
* What is not sent is lost, a bias. The source's sparsification keeps it for the next gradient (error feedback).

Shapes: d coordinates, C chunks, M blocks of B = 256 coordinates, K = ceil(M / C), n workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.baselines.blocks import block_plan
from dynamiq_core.errors import ConfigError, InputError
from dynamiq_core.protocol import Codec, Received

BLOCK = 256
"""Coordinates that are sent or dropped together; the source's default."""

ENTRY_BITS = 16
STATISTICS_BITS = 16 / BLOCK


class OmniReducePlan(NamedTuple):
    """Which blocks are sent in which chunk.

    Attributes:
        workers: number of ranks n.
        numel: number of coordinates d.
        sent: how many blocks each chunk sends.
        order: int64 [C, K], blocks of each chunk by falling norm, of which the first are sent; -1 past the end.
        finite: bool [M], whether all ranks' entries of a block are finite.
    """

    workers: int
    numel: int
    sent: tuple[int, ...]
    order: Tensor
    finite: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each chunk's message has."""
        return tuple(blocks * BLOCK * ENTRY_BITS // 8 for blocks in self.sent)


class OmniReduce(Codec[OmniReducePlan]):
    """The blocks with the largest norms in bfloat16, the others as zeros; see `dynamiq_core.baselines.omnireduce`.

    Args:
        bits: budget per coordinate, statistics included, 0.25 to 17; the share of the blocks that is sent is a
            sixteenth of it, and never less than one block.

    Raises:
        ConfigError: the budget is out of range.
    """

    def __init__(self, bits: float = 5.0) -> None:
        if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 0.25 <= bits <= 17:
            raise ConfigError(f"bits of OmniReduce must be from 0.25 to 17, not {bits!r}")
        self.bits = float(bits)

    def __repr__(self) -> str:
        return f"OmniReduce({self.bits:g})"

    def fingerprint(self) -> str:
        """The budget."""
        return f"omnireduce bits={self.bits!r}"

    def statistics(self, x: Tensor) -> Tensor:
        """Norm of every block of ``x`` [d]: bfloat16 [M, 1]."""
        layout = block_plan(x.numel(), workers=1, chunks=1, block=BLOCK, block_bytes=0)
        square = layout.blocks(x, 0).to(torch.float64).square().sum(dim=1)
        return square.sqrt().to(torch.float32).to(torch.bfloat16)[:, None]

    def merge_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Norms, bfloat16 [m, 1] in each of ``parts``, add up as squares."""
        square = torch.stack([part.to(torch.float64).square() for part in parts]).sum(dim=0)
        return square.sqrt().to(torch.float32).to(torch.bfloat16)

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
    ) -> OmniReducePlan:
        """The choice of blocks; arguments as in `Codec.plan`.

        Raises:
            InputError: an argument is out of range.
        """
        blocks = block_plan(numel, workers=workers, chunks=chunks, block=BLOCK, block_bytes=0).bounds[-1]
        if statistics is None or statistics.shape != (blocks, 1):
            shape = None if statistics is None else tuple(statistics.shape)
            raise InputError(f"statistics must be of shape {(blocks, 1)}, not {shape}")
        norms = statistics[:, 0].to(device, torch.float32)
        falling = torch.sort(norms, descending=True, stable=True).indices  # NaN comes first; ties by index
        budget = min(blocks, max(1, int(blocks * (self.bits - STATISTICS_BITS) / ENTRY_BITS)))
        longest = -(-blocks // chunks)
        dealt = torch.nn.functional.pad(falling, (0, longest * chunks - blocks), value=-1)
        return OmniReducePlan(
            workers=workers,
            numel=numel,
            sent=tuple((budget - chunk + chunks - 1) // chunks for chunk in range(chunks)),
            order=dealt.view(longest, chunks).T.contiguous(),
            finite=norms.isfinite(),
        )

    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: OmniReducePlan,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop, as in `Codec.decompress_accumulate_recompress`; all slots are alike."""
        where = _coordinates(plan.order[chunk, : plan.sent[chunk]])
        total = torch.cat((x, x.new_zeros(1)))[where.clamp(max=plan.numel)].to(torch.float32)
        for message, _ in received:
            total += message.view(torch.bfloat16)
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        out.view(torch.bfloat16).copy_(total)
        return out

    def decompress(self, message: Tensor, plan: OmniReducePlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """The chunk's coordinates of ``out`` [d] become the mean, or zero; see `Codec.decompress`."""
        index, sent = plan.order[chunk], plan.sent[chunk]
        # Blocks that are not sent are zero, unless they would hide what is not finite.
        unsent = torch.where(plan.finite[index[sent:]], 0.0, torch.nan).repeat_interleave(BLOCK)
        values = torch.cat((message.view(torch.bfloat16).to(torch.float32) / plan.workers, unsent))
        # What only fills a block or a chunk goes to one place past the end, which is then dropped.
        where = torch.where((index >= 0).repeat_interleave(BLOCK), _coordinates(index), plan.numel)
        padded = torch.cat((out, out.new_zeros(1)))
        padded[where.clamp(max=plan.numel)] = values.to(out.dtype)
        return out.copy_(padded[:-1])


def _coordinates(index: Tensor) -> Tensor:
    """Where the entries of some blocks are: int64 [blocks * B]."""
    return (index[:, None] * BLOCK + torch.arange(BLOCK, device=index.device)).flatten()
