"""The wire format, version 4: what a message of one chunk looks like, and how long it is.

A message is two sections and a zero tail:

    codes    for every super-group of the chunk, in plan order: its bit planes, 32 bytes each
    scales   group codes of every super-group of width > 0 (8 or 16 bytes each), then their super scales (bfloat16)
    tail     zeros up to the message's size

Super-groups are ordered by falling width and, within a width, by index. Those of width 0 come last and have neither
codes nor scales. The
scale section starts at a multiple of 32 bytes. Multi-byte values are little-endian. The size depends on
(d, chunks, config) alone, so no rank ever waits to learn a length.

Shapes: d coordinates, M super-groups, C chunks.
"""

from __future__ import annotations

from dynamiq_core.allocation import cost
from dynamiq_core.config import SUPER_GROUP, CodecConfig
from dynamiq_core.errors import InputError
from dynamiq_core.statistics import BYTES, super_groups

VERSION = 4

OVERHEAD = 48
"""Bytes of the budget of every chunk left to whoever carries it: a header for each phase, and agreement."""

SMALL = 16
"""Tensors of fewer super-groups are granted their padding and the overhead on top of the budget."""

LARGEST_NUMEL = 2**35 - SUPER_GROUP
"""Largest d: beyond it the 32-bit lane counter of the random numbers would wrap."""

LARGEST_MESSAGE = 2**31 - 2**24
"""Most bytes of a message: offsets in a plan are 32-bit integers, and kernels count a stride past the end with them."""


def chunk_lengths(numel: int, chunks: int) -> tuple[int, ...]:
    """Super-groups of every chunk when M of them are dealt round-robin.

    >>> chunk_lengths(2560, 4)
    (3, 3, 2, 2)
    """
    total = super_groups(numel)
    return tuple((total - c + chunks - 1) // chunks for c in range(chunks))


def message_sizes(config: CodecConfig, numel: int, chunks: int) -> tuple[int, ...]:
    """Bytes of every chunk's message.

    Args:
        config: budget, widths and kind of scales.
        numel: d, at least 1.
        chunks: number of chunks C.

    Raises:
        InputError: d is outside what a message can describe, or so few chunks make a message too long.
    """
    if not 0 < numel <= LARGEST_NUMEL:
        raise InputError(f"a tensor must have from 1 to {LARGEST_NUMEL} coordinates, not {numel}")
    total = super_groups(numel)
    granted, overhead = (numel, OVERHEAD) if total >= SMALL else (total * SUPER_GROUP, 0)
    alike = total >= SMALL * chunks  # then no rank sends more than its share, whichever chunks it sends
    least, most = cost(config.widths[0], config), cost(config.widths[-1], config)

    def size(length: int) -> int:
        if not length:
            return 0
        coordinates = granted / chunks if alike else granted * length / total
        share = int(config.bits * coordinates / 8) - BYTES * length - overhead
        return min(max(share, least * length), most * length)

    sizes = tuple(size(length) for length in chunk_lengths(numel, chunks))
    if sizes[0] > LARGEST_MESSAGE:
        raise InputError(
            f"a message may have up to {LARGEST_MESSAGE} bytes, not {sizes[0]}: use more than {chunks} chunks"
        )
    return sizes
