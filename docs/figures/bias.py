"""What is left of the error when many all-reduces of the same gradients are averaged: nothing, unless there is a bias.

Shapes: n ranks, V values of each rank, R repetitions of them in one tensor, T draws in all.
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import COLOURS, STYLE, TEXT, save
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_ddp import simulate

VALUES = 32
RANKS = 4
ROUNDINGS = ("independent", "correlated", "dithered")


def errors(rounding: str, *, draws: int, schedule: str = "ring", width: int = 3) -> Tensor:
    """Errors of the mean of four ranks: float64 [T, V], in every draw with other random numbers.

    Every super-group has random numbers of its own, so a tensor that repeats its values holds many draws.
    """
    values = torch.randn(RANKS, VALUES, generator=torch.Generator().manual_seed(3))
    repeats = min(draws, 1024)
    gradients = values.repeat(1, repeats)
    codec = DynamiQ(CodecConfig(bits=width + 1, widths=(width,), rounding=rounding, subtract_mean=False))
    exact = values.double().mean(dim=0)
    found = [
        simulate(gradients, codec=codec, schedule=schedule, step=step).mean.view(-1, VALUES).double() - exact
        for step in range(-(-draws // repeats))
    ]
    return torch.cat(found)[:draws]


def measure(draws: int = 1 << 12) -> dict[str, dict[int, float]]:
    """By rounding: root mean square error of an average of T draws, relative to that of one draw."""
    result = {}
    for rounding in ROUNDINGS:
        every = errors(rounding, draws=draws)
        deviation = every.square().mean().sqrt()
        result[rounding] = {
            count: float(every.view(-1, count, VALUES).mean(dim=1).square().mean().sqrt() / deviation)
            for count in (1 << k for k in range(0, draws.bit_length(), 3))
        }
    return result


def table(left: dict[str, dict[int, float]]) -> list[tuple[str, ...]]:
    """Rows of the page's table: rounding, and what is left after every number of draws, in per cent."""
    return [
        (rounding, *(f"{100 * share:#.3g}".rstrip(".") for share in shares.values()))
        for rounding, shares in left.items()
    ]


def draw(left: dict[str, dict[int, float]], path: Path) -> None:
    """What is left against the number of draws."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        for rounding, marker in zip(ROUNDINGS, ("s-", "o-", "^--"), strict=True):
            axes.plot(*zip(*left[rounding].items(), strict=True), marker, color=COLOURS[rounding], label=rounding)
        counts = list(left["dithered"])
        axes.plot(counts, [count**-0.5 for count in counts], color=TEXT, linewidth=0.8, label="1 / √draws")
        axes.set(xscale="log", yscale="log", xlabel="draws averaged", ylabel="error left, of one draw = 1")
        axes.set_xscale("log", base=2)
        axes.legend()
        save(figure, path)
