"""What `DynamiQPlan.expected_error_of` predicts, and what is measured, where its assumptions hold and where not.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from licence import gradients
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.statistics import squared_norms
from dynamiq_ddp import simulate
from dynamiq_transport import common_gain, gain, ring

RANKS = 4
NUMEL = 1 << 15


def cases() -> Iterator[tuple[str, Tensor]]:
    """Gradients [n, d] by name."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(RANKS, NUMEL, generator=generator)

    common = torch.randn(NUMEL, generator=generator)
    yield "independent, normal", noise()
    yield "half of the energy in common", (noise() + common) / 2**0.5
    yield "the same on every rank", common.expand(RANKS, -1)
    yield "independent, Laplace", noise().sign() * torch.empty(RANKS, NUMEL).exponential_(generator=generator)
    yield (
        "independent, Student t with 3 degrees",
        noise() * (3 / (noise().square() + noise().square() + noise().square())).sqrt(),
    )
    yield "one coordinate in 16, the rest zero", noise() * (torch.arange(NUMEL) % 16 == 0)
    yield "the tutorial's gradients", gradients(RANKS)


def predict(rows: Tensor, mean: Tensor, codec: DynamiQ) -> float:
    """What `Stats.predicted_vnmse` would be for this mean: the expected error relative to its norm."""
    n, d = rows.shape
    statistics = codec.merge_statistics([codec.statistics(row) for row in rows])
    plan = codec.plan(statistics, d, device=rows.device, workers=n, chunks=n, gain=gain(ring, n))
    squares = squared_norms(mean)
    expected = plan.expected_error_of(squares, growth=common_gain(ring, n) / gain(ring, n))
    return float(expected / n**2 / squares.sum())


def measure() -> dict[str, tuple[float, float]]:
    """Predicted and measured vNMSE at 5 bits over the ring, by case."""
    codec = DynamiQ(CodecConfig(bits=5.0))
    result = {}
    for name, rows in cases():
        done = [simulate(rows, codec=codec, step=step) for step in range(2)]
        predicted = [predict(rows, each.mean, codec) for each in done]
        result[name] = (sum(predicted) / len(done), sum(each.vnmse for each in done) / len(done))
    return result


def table(found: dict[str, tuple[float, float]]) -> list[tuple[str, ...]]:
    """Rows of the page's table: case, both errors times 1000, and their ratio."""
    return [
        (name, f"{1000 * expected:.2f}", f"{1000 * measured:.2f}", f"{measured / expected:.2f}")
        for name, (expected, measured) in found.items()
    ]
