"""How the error of a compressed sum grows with the number of ranks, for every kind of rounding and every schedule.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import COLOURS, STYLE, TEXT, save
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, Received, vnmse
from dynamiq_transport import ScheduleFunction, butterfly, direct, gain, ring

RANKS = (1, 2, 4, 8, 16)
ROUNDINGS = ("independent", "correlated", "dithered")
SCHEDULES = {"ring": ring, "butterfly": butterfly, "direct": direct}


def measure(numel: int = 1 << 14) -> dict[tuple[str, str], list[float]]:
    """Squared error of the sum relative to its squared norm, by (rounding, schedule), for every number of ranks.

    The gradients are independent noise and every super-group has the same width, so that nothing but the hops differs.
    """
    gradients = torch.randn(max(RANKS), numel, generator=torch.Generator().manual_seed(0))
    return {
        (rounding, name): [
            vnmse(reduce(gradients[:n], DynamiQ(CodecConfig(widths=(4,), rounding=rounding)), schedule), exact)
            for n in RANKS
            for exact in [gradients[:n].double().mean(dim=0)]
        ]
        for rounding in ROUNDINGS
        for name, schedule in SCHEDULES.items()
    }


def reduce(gradients: Tensor, codec: DynamiQ, schedule: ScheduleFunction) -> Tensor:
    """The mean [d] of the rows [n, d] as a single chunk that takes the way of chunk 0 of the schedule."""
    n, d = gradients.shape
    statistics = codec.merge_statistics([codec.statistics(row) for row in gradients])
    plan = codec.plan(statistics, d, device=gradients.device, workers=n, chunks=1)
    every = [schedule(rank, n) for rank in range(n)]
    waiting: list[list[Received]] = [[] for _ in range(n)]

    def encode(rank: int) -> Received:
        message = codec.decompress_accumulate_recompress(waiting[rank], gradients[rank], plan, chunk=0, slot=rank)
        return Received(message, slot=rank)

    for steps in zip(*(one.reduce for one in every), strict=True):
        sent = [(p, encode(rank)) for rank, step in enumerate(steps) for p, chunks in step.sends if 0 in chunks]
        for peer, message in sent:
            waiting[peer].append(message)
    owner = next(rank for rank, one in enumerate(every) if 0 in one.owned)
    final = encode(owner)
    return codec.decompress(final.message, plan, chunk=0, slot=final.slot, out=torch.empty(d))


def table(errors: dict[tuple[str, str], list[float]]) -> list[tuple[str, ...]]:
    """Rows of the page's table: rounding, schedule, and the error times 1000 for every number of ranks."""
    return [(*key, *(f"{1000 * error:.1f}" for error in values)) for key, values in errors.items()]


def draw(errors: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Both comparisons one above the other, with what the gain of each schedule predicts as thin lines."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8, 5.6), layout="constrained")
        left, right = figure.subplots(2, 1, sharex=True)
        for rounding in ROUNDINGS:
            left.plot(RANKS, errors[rounding, "ring"], "o-", color=COLOURS[rounding], label=rounding)
        left.set(title="ring, by rounding", ylabel="vNMSE of the mean")
        for schedule, marker in zip(SCHEDULES, ("o", "s", "^"), strict=True):
            predicted = [errors["dithered", schedule][0] * gain(SCHEDULES[schedule], n) for n in RANKS]
            right.plot(RANKS, predicted, color=TEXT, linewidth=0.8)
            right.plot(
                RANKS, errors["dithered", schedule], marker, color=COLOURS["dithered"], label=schedule, linestyle="none"
            )
        right.set(title="dithered, by schedule; lines: error of one × gain", xlabel="ranks", ylabel="vNMSE of the mean")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(RANKS, [str(n) for n in RANKS])
            axes.legend()
        save(figure, path)
