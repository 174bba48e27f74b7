"""Which super-groups get how many bits, and what that is worth.

Shapes: n ranks, d coordinates, M super-groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from drawing import STYLE, TEXT, save
from licence import gradients
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from dynamiq_core import SUPER_GROUP, CodecConfig, DynamiQ
from dynamiq_ddp import simulate
from dynamiq_transport import gain, ring

RANKS = 4
BUDGETS = (3.0, 4.0, 5.0, 6.0)
SHADES = ("#c4762b", "#b0568f", "#8f6fd8", "#2f8f7f")
ONE_WIDTH = 4.5
"""Budget into which a width of 4 bits for everybody just fits."""


class Allocation(NamedTuple):
    """Energy of every super-group over all ranks, and its width."""

    energy: Tensor
    width: Tensor


def allocate(rows: Tensor, bits: float) -> Allocation:
    """What the plan of a ring all-reduce of ``rows`` [n, d] decides: float64 [M] and int64 [M]."""
    n, d = rows.shape
    codec = DynamiQ(CodecConfig(bits=bits, subtract_mean=False))
    statistics = codec.merge_statistics([codec.statistics(row) for row in rows])
    plan = codec.plan(statistics, d, device=rows.device, workers=n, chunks=n, gain=gain(ring, n))
    width = torch.zeros(len(statistics), dtype=torch.int64)
    width[plan.index[plan.index >= 0].long()] = plan.width[plan.index >= 0].long()
    return Allocation(statistics[:, 1].double().square() * SUPER_GROUP, width)


def measure() -> dict[float, Allocation]:
    """The allocation for the tutorial's gradients, by budget."""
    return {bits: allocate(gradients(RANKS), bits) for bits in BUDGETS}


def worth() -> dict[str, tuple[float, float, float]]:
    """vNMSE at one budget with one width for all, with three widths, and with the default ones, by kind of gradient."""
    noise = torch.randn(RANKS, 1 << 16, generator=torch.Generator().manual_seed(0))
    result = {}
    for name, rows in (("noise", noise), ("the tutorial's gradients", gradients(RANKS))):
        choices = ((4,), (2, 4, 8), CodecConfig().widths)
        one, three, eight = (
            simulate(rows, codec=DynamiQ(CodecConfig(bits=ONE_WIDTH, widths=widths))).vnmse for widths in choices
        )
        result[name] = (one, three, eight)
    return result


def table(worth: dict[str, tuple[float, float, float]]) -> list[tuple[str, ...]]:
    """Rows of the page's table: gradients, and the errors times 1000."""
    return [(name, *(f"{1000 * error:.2f}" for error in errors)) for name, errors in worth.items()]


def draw(allocations: dict[float, Allocation], path: Path) -> None:
    """Width against energy, one colour for each budget."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8, 3.4), layout="constrained")
        axes = figure.subplots()
        for shade, (bits, (energy, width)) in zip(SHADES, allocations.items(), strict=True):
            order = energy.argsort()[(energy == 0).sum() :]
            octaves = torch.log2(energy[order] / energy.max())
            axes.step(octaves, width[order], where="mid", color=shade, label=f"{bits:g} bits")
        axes.set(xlabel="energy of a super-group, octaves below the largest", ylabel="bit width")
        axes.set_yticks(range(9))
        axes.grid(axis="y", color=TEXT, alpha=0.25, linewidth=0.5)
        axes.legend(title="budget", loc="upper left")
        save(figure, path)
