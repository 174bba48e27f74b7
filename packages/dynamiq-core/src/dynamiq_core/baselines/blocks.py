"""What block codecs share: chunks that are ranges of whole blocks, and integers of any width packed without waste.

Shapes: d coordinates, C chunks, M blocks of B coordinates, m of them in the chunk at hand, n workers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.errors import InputError

WORD = 8
"""Codes that are packed together, and bytes of the integer in which that happens."""


class BlockPlan(NamedTuple):
    """Chunks that are ranges of blocks of equal size; the last block is filled up with zeros.

    Attributes:
        workers: number of ranks n.
        numel: number of coordinates d.
        block: coordinates of a block B.
        bounds: first block of every chunk, then M; C + 1 values.
        block_bytes: bytes of a block in a message.
    """

    workers: int
    numel: int
    block: int
    bounds: tuple[int, ...]
    block_bytes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each chunk's message has."""
        return tuple((end - start) * self.block_bytes for start, end in zip(self.bounds, self.bounds[1:], strict=False))

    def blocks(self, x: Tensor, chunk: int) -> Tensor:
        """The chunk's coordinates of ``x`` [d]: float32 [m, B], a copy."""
        start, end = self._range(chunk)
        filled = torch.zeros((self.bounds[chunk + 1] - self.bounds[chunk]) * self.block, device=x.device)
        filled[: end - start].copy_(x[start:end])
        return filled.view(-1, self.block)

    def write(self, values: Tensor, out: Tensor, chunk: int) -> None:
        """Put the chunk's values [m, B] into ``out`` [d], without those that only filled the last block."""
        start, end = self._range(chunk)
        out[start:end].copy_(values.flatten()[: end - start])

    def _range(self, chunk: int) -> tuple[int, int]:
        first, last = (min(bound * self.block, self.numel) for bound in self.bounds[chunk : chunk + 2])
        return first, last


def block_plan(numel: int, *, workers: int, chunks: int, block: int, block_bytes: int) -> BlockPlan:
    """Split the blocks of d coordinates into C ranges that differ by at most one in length.

    >>> block_plan(1000, workers=4, chunks=4, block=32, block_bytes=33).sizes
    (264, 264, 264, 264)

    Raises:
        InputError: numel, workers or chunks is not positive.
    """
    if numel < 1 or workers < 1 or chunks < 1:
        raise InputError(f"numel, workers and chunks must be positive, not {numel}, {workers} and {chunks}")
    total = -(-numel // block)
    return BlockPlan(workers, numel, block, tuple(total * chunk // chunks for chunk in range(chunks + 1)), block_bytes)


def pack(codes: Tensor, width: int) -> Tensor:
    """Pack non-negative integers of a fixed width: eight of them into ``width`` bytes, the first one lowest.

    What does not fit into eight bits goes into a second section, and so on.

    >>> pack(torch.arange(8), 3).tolist()
    [136, 198, 250]

    Args:
        codes: integers [k], k a multiple of 8, from 0 to 2**width - 1.
        width: 1 or more.

    Returns:
        uint8 [k * width / 8].
    """
    low = min(width, WORD)
    shifts = torch.arange(WORD, device=codes.device) * low
    words = ((codes.to(torch.int64) & 0xFF).view(-1, WORD) << shifts).sum(dim=1)
    packed = words.view(torch.uint8).view(-1, WORD)[:, :low].flatten()
    return packed if width == low else torch.cat((packed, pack(codes >> WORD, width - WORD)))


def unpack(packed: Tensor, width: int) -> Tensor:
    """The codes that `pack` was given: int64 [k] for uint8 [k * width / 8]."""
    low = min(width, WORD)
    split = packed.numel() // width * low
    groups = torch.nn.functional.pad(packed[:split].view(-1, low), (0, WORD - low))
    shifts = torch.arange(WORD, device=packed.device) * low
    codes = ((groups.contiguous().view(torch.int64) >> shifts) & ((1 << low) - 1)).flatten()
    return codes if width == low else codes + (unpack(packed[split:], width - WORD) << WORD)
