"""Tables and a picture of what was measured: loss by step and seconds by step, put together."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import records
from matplotlib import rc_context
from matplotlib.figure import Figure
from methods import PLAIN_STEPS, Method
from records import markdown
from training import Run

from dynamiq_core import ConfigError
from dynamiq_ddp.demo.report import smooth
from dynamiq_ddp.pictures import OURS, PLAIN, STYLE

TOLERANCE = 0.01
"""The target is the fp32 run's smoothed training loss at its end, and so much more."""

SHOWN = {
    Method("fp32", None): ("#9aa4ab", "-", "fp32"),
    Method("bf16-hook", None): (PLAIN, "--", "torch's bf16 hook"),
    Method("powersgd:4", None): ("#c48a2c", "-", "PowerSGD, rank 4"),
    Method("mxfp8", "ring"): ("#3d7ea6", "-", "MXFP8"),
    Method("mxfp4", "ring"): ("#3d7ea6", ":", "MXFP4"),
    Method("dynamiq:5", "ring"): (OURS, "-", "DynamiQ, 5 bits"),
}
"""Colour, line and label of what the picture shows; all of 20 methods would be a tangle."""


class Results:
    """All runs, by what they tell.

    Args:
        runs: whole ones without a limit on the network, whole ones with, and those that were cut short.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self.tasks = list(dict.fromkeys(run.task for run in runs))
        whole = [run for run in runs if len(run.losses) == run.steps]
        self._curves = [run for run in whole if run.network is None]
        self.limited = [run for run in whole if run.network is not None]
        self._paces = [run for run in runs if run.network is not None and len(run.losses) < run.steps]
        self.used = [*self._curves, *self.limited, *self._paces]

    def methods(self, task: str) -> list[Method]:
        """Those that were trained to the end, in the order of their errors' budget: as they were run."""
        return list(dict.fromkeys(method_of(run) for run in self._curves if run.task == task))

    def networks(self, task: str) -> list[str]:
        """Those of which a pace is known, slowest first."""
        found = dict.fromkeys(run.network for run in self._paces if run.task == task and run.network)
        return sorted(found, key=lambda name: int(re.sub(r"\D", "", name) or 0))

    def curves(self, task: str, method: Method) -> dict[int, Run]:
        """Whole runs by seed."""
        return {run.seed: run for run in self._curves if run.task == task and method_of(run) == method}

    def pace(self, task: str, method: Method, network: str) -> Run | None:
        """The run that tells how long a step takes."""
        found = [run for run in self._paces if (run.task, method_of(run), run.network) == (task, method, network)]
        return found[-1] if found else None

    def steps_to_target(self, task: str, method: Method) -> dict[int, int | None]:
        """By seed: how many steps it takes to come to the target; None where it never does."""
        exact = self.curves(task, Method("fp32", None))
        found: dict[int, int | None] = {}
        for seed, run in self.curves(task, method).items():
            if seed in exact:
                target = (1 + TOLERANCE) * smooth(exact[seed].losses)[-1]
                reached = (step for step, loss in enumerate(smooth(run.losses), 1) if loss <= target)
                found[seed] = next(reached, None)
        return found


def method_of(run: Run) -> Method:
    """How the run averaged."""
    return Method(run.method, run.schedule)


def seconds_per_step(run: Run) -> float:
    """Median, once the buckets are arranged and PowerSGD has begun."""
    return statistics.median(run.seconds[PLAIN_STEPS:])


def write(runs: Iterable[Run], folder: Path) -> None:
    """Write what the page of the documentation includes: for each task three tables, and of all when, and one picture.

    Raises:
        ConfigError: there is nothing to report.
    """
    results = Results(runs)
    if not any(results.networks(task) for task in results.tasks):
        raise ConfigError("there is nothing to report: no run with --network and --only is among these")
    folder.mkdir(parents=True, exist_ok=True)
    for task in results.tasks:
        folder.joinpath(f"{task}-loss.md").write_text(losses(results, task))
        folder.joinpath(f"{task}-time.md").write_text(times(results, task))
        if any(run.task == task for run in results.limited):
            folder.joinpath(f"{task}-checked.md").write_text(checked(results, task))
    folder.joinpath("measured.md").write_text(measured(results))
    draw(results, folder / "loss-against-time.png")


def measured(results: Results) -> str:
    """When, and with which code."""
    return records.measured((run.date, run.commit) for run in results.used)


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The mean, and from where to where if there are several."""
    mean = form(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ({form(min(values))} to {form(max(values))})"


def losses(results: Results, task: str) -> str:
    """What training ends with, relative to the exact mean of the same seeds and to bfloat16."""
    rows = []
    exact = results.curves(task, Method("fp32", None))
    half = results.curves(task, Method("bf16", "ring"))
    for method in results.methods(task):
        found = results.curves(task, method)
        runs = list(found.values())
        bits = runs[0].bits_per_coordinate
        gaps = [
            [
                100 * (run.validation_loss / base[seed].validation_loss - 1)
                for seed, run in found.items()
                if seed in base
            ]
            for base in (exact, half)
        ]
        rows.append(
            (
                str(method),
                "" if bits is None else f"{bits:.2f}",
                str(len(runs)),
                spread([run.validation_loss for run in runs], "{:.4f}".format),
                *("" if not gap else spread(gap, "{:+.2f} %".format) for gap in gaps),
                f"{statistics.fmean(run.vnmse for run in runs):.1e}",
                "yes" if all(run.replicas_identical for run in runs) else "no",
            )
        )
    columns = (
        "method",
        "bits",
        "seeds",
        "validation loss",
        "to fp32",
        "to bf16, ring",
        "vNMSE at the end",
        "identical",
    )
    return markdown(columns, rows)


class Time(NamedTuple):
    """Of one method on one network: seconds per step, and to the target, mean over the seeds."""

    step: float
    target: float | None


def time_of(results: Results, task: str, method: Method, network: str) -> Time | None:
    """None if its pace there was not measured; no target if a seed never comes to it."""
    pace = results.pace(task, method, network)
    if pace is None:
        return None
    step = seconds_per_step(pace)
    counts = list(results.steps_to_target(task, method).values())
    reached = [count for count in counts if count is not None]
    return Time(step, step * statistics.fmean(reached) if reached and len(reached) == len(counts) else None)


def times(results: Results, task: str) -> str:
    """Milliseconds per step, seconds to the target, and how many times faster than fp32, on every network."""
    networks = results.networks(task)
    rows = []
    for method in results.methods(task):
        paces = [results.pace(task, method, network) for network in networks]
        counts = list(results.steps_to_target(task, method).values())
        if not any(paces) or not counts:
            continue
        sent = next((pace.bytes_per_step for pace in paces if pace is not None and pace.bytes_per_step), None)
        cells = []
        for network in networks:
            mine, plain = (time_of(results, task, each, network) for each in (method, Method("fp32", None)))
            cells.append("" if mine is None else f"{1e3 * mine.step:.0f}")
            cells.append("" if mine is None else "never" if mine.target is None else f"{mine.target:.1f}")
            both = mine and plain and mine.target and plain.target
            cells.append("" if not both else f"{plain.target / mine.target:.2f}")
        reached = [count for count in counts if count is not None]
        rows.append(
            (
                str(method),
                "" if sent is None else f"{sent / 1e6:.2f}",
                "never" if len(reached) < len(counts) else spread(reached, "{:.0f}".format),
                *cells,
            )
        )
    per_network = [
        f"{network}: {what}" for network in networks for what in ("ms per step", "s to target", "times fp32")
    ]
    return markdown(("method", "MB per step", "steps to target", *per_network), rows)


def checked(results: Results, task: str) -> str:
    """Whole runs on a limited network beside what is put together."""
    rows = []
    for run in results.limited:
        if run.task != task or run.network is None:
            continue
        pace = results.pace(task, method_of(run), run.network)
        twin = results.curves(task, method_of(run)).get(run.seed)
        if pace is None or twin is None:
            continue
        expected = run.steps * seconds_per_step(pace)
        rows.append(
            (
                f"{method_of(run)}, seed {run.seed}",
                run.network,
                f"{sum(run.seconds):.1f}",
                f"{expected:.1f}",
                f"{sum(run.seconds) / expected:.2f}",
                f"{run.validation_loss:.4f}",
                f"{twin.validation_loss:.4f}",
            )
        )
    columns = ("run", "network", "seconds", "put together", "ratio", "validation loss", "without a limit")
    return markdown(columns, rows)


def draw(results: Results, path: Path) -> None:
    """Smoothed training loss against seconds: a row for each task, a column for each network."""
    tasks = [task for task in results.tasks if results.networks(task)]
    width = max(len(results.networks(task)) for task in tasks)
    with rc_context(STYLE):
        figure = Figure(figsize=(4 * width, 3.4 * len(tasks)), layout="constrained")
        for axes, task in zip(figure.subplots(len(tasks), width, squeeze=False), tasks, strict=True):
            for axis, network in zip(axes, results.networks(task), strict=False):
                for method, (color, line, label) in SHOWN.items():
                    pace, found = results.pace(task, method, network), results.curves(task, method)
                    if pace is None or not found:
                        continue
                    step = seconds_per_step(pace)
                    for number, run in enumerate(found.values()):
                        values = smooth(run.losses)
                        at = [step * count for count in range(1, len(values) + 1)]
                        style = {"color": color, "linestyle": line, "alpha": 0.9, "linewidth": 1.4}
                        axis.plot(at, values, label=label if number == 0 else None, **style)
                axis.set(xscale="log", title=f"{task}, {network}", xlabel="seconds")
            axes[0].set(ylabel="training loss")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=110)
