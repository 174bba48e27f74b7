"""What a chain of hops loses at few bits, as measured and as the allocation reckons.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynamiq_core import CodecConfig, DynamiQ, Received
from dynamiq_core.allocation import chained_errors, normalised_errors

HOPS = 64
NUMEL = 1 << 14
WIDTHS = (2, 3, 4, 5)


class Chain(NamedTuple):
    """Errors relative to the energy that goes in: of one encoding, times the gain, by the formula, and measured."""

    once: float
    times_gain: float
    formula: float
    measured: float


def measure() -> dict[int, Chain]:
    """One chain of encodings of independent noise, dithered, by width."""
    rows = torch.randn(HOPS, NUMEL, generator=torch.Generator().manual_seed(1))
    return {width: _chain(rows, CodecConfig(widths=(width,), bits=width + 1)) for width in WIDTHS}


def _chain(rows: torch.Tensor, config: CodecConfig) -> Chain:
    codec, (n, d), gain = DynamiQ(config), rows.shape, (len(rows) + 1) / 2
    statistics = codec.merge_statistics([codec.statistics(row) for row in rows])
    plan = codec.plan(statistics, d, device=rows.device, workers=n, chunks=1, gain=gain)
    received: list[Received] = []
    for slot, row in enumerate(rows):
        message = codec.decompress_accumulate_recompress(received, row, plan, chunk=0, slot=slot)
        received = [Received(message, slot)]
    mean = codec.decompress(message, plan, chunk=0, slot=n - 1, out=torch.empty(d))
    lost = (mean.double() - rows.double().mean(dim=0)).square().sum() * n**2
    width = config.widths[0]
    once = normalised_errors(config)[width]
    return Chain(once, gain * once, chained_errors(config, gain)[width], float(lost / rows.double().square().sum()))


def table(chains: dict[int, Chain]) -> list[tuple[str, ...]]:
    """Rows of the page's table: width, and the errors."""
    return [
        (str(width), *(f"{error:.3g}" if error < 1000 else f"{error:.0f}" for error in chain))
        for width, chain in chains.items()
    ]
