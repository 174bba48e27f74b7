"""The demo's result: a table, a picture, and one JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from dynamiq_ddp.pictures import OURS, PLAIN, STYLE

from .train import Run


class Traffic(NamedTuple):
    """What the compressed run put on the network and spent on it.

    Attributes:
        bits_per_coordinate: bits on the wire per coordinate and direction, everything counted.
        bytes_per_step: bytes that a rank sends per step, mean over the ranks.
        codec_share: part of the step time that went into the codec, between 0 and 1.
        backend: name of the backend that ran.
    """

    bits_per_coordinate: float
    bytes_per_step: float
    codec_share: float
    backend: str


class Report(NamedTuple):
    """Both runs beside each other.

    Attributes:
        allreduce: the run with DDP's own all-reduce.
        dynamiq: the run with DynamiQ.
        traffic: what DynamiQ put on the network.
        ranks: number of processes.
        parameters: d, coordinates of the gradient.
        seconds: wall-clock time of the whole demo.
    """

    allreduce: Run
    dynamiq: Run
    traffic: Traffic
    ranks: int
    parameters: int
    seconds: float

    @property
    def difference(self) -> float:
        """Validation loss of DynamiQ relative to the plain all-reduce; 0 where they are equal."""
        return self.dynamiq.validation_loss / self.allreduce.validation_loss - 1

    @property
    def plain_bytes_per_step(self) -> float:
        """Bytes that a rank sends per step in a ring all-reduce of float32 gradients."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.parameters

    def figures(self) -> dict[str, float | int | bool | str]:
        """What `table` shows, for other programs."""
        return {
            "loss_allreduce": round(self.allreduce.validation_loss, 6),
            "loss_dynamiq": round(self.dynamiq.validation_loss, 6),
            "bits_per_coordinate": round(self.traffic.bits_per_coordinate, 4),
            "bytes_per_step": round(self.traffic.bytes_per_step),
            "vnmse": float(f"{self.dynamiq.vnmse:.4g}"),
            "replicas_identical": self.dynamiq.replicas_identical,
            "backend": self.traffic.backend,
            "codec_seconds_per_step": float(
                f"{self.traffic.codec_share * statistics.fmean(self.dynamiq.step_seconds):.3g}"
            ),
            "seconds": round(self.seconds, 1),
        }

    def table(self) -> Table:
        """The figures for the eye."""
        plain, ours, traffic = self.allreduce, self.dynamiq, self.traffic
        table = Table(
            title=f"{self.parameters:,} parameters · {self.ranks} ranks · {len(plain.losses)} steps",
            caption="* computed, for a ring of float32. On one machine the network is memory, and bytes cost little.",
        )
        table.add_column("")
        table.add_column("all-reduce", justify="right")
        table.add_column("DynamiQ", justify="right")
        table.add_row("validation loss (nats per byte)", f"{plain.validation_loss:.4f}", f"{ours.validation_loss:.4f}")
        table.add_row("  difference", "", f"{self.difference:+.2%}")
        table.add_row("bits on the wire per coordinate", "32", f"{traffic.bits_per_coordinate:.3f}")
        table.add_row(
            "sent per step and rank", f"{_megabytes(self.plain_bytes_per_step)} *", _megabytes(traffic.bytes_per_step)
        )
        table.add_row("vNMSE of the last gradient", f"{plain.vnmse:.1e}", f"{ours.vnmse:.2e}")
        table.add_row("replicas bit-identical", _yes(plain.replicas_identical), _yes(ours.replicas_identical))
        table.add_row("step time, median", _milliseconds(plain), _milliseconds(ours))
        table.add_row("  of which codec", "", f"{traffic.codec_share:.0%}")
        table.add_row("backend", "", traffic.backend)
        return table

    def plot(self, path: Path) -> None:
        """Draw both loss curves and their difference into a PNG; missing directories are made."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        plain, ours = smooth(self.allreduce.losses), smooth(self.dynamiq.losses)
        steps = range(1, len(plain) + 1)
        with rc_context(STYLE):
            figure = Figure(figsize=(8, 5.4), layout="constrained")
            loss, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
            loss.plot(steps, self.allreduce.losses, color=PLAIN, alpha=0.15, linewidth=1)
            loss.plot(steps, self.dynamiq.losses, color=OURS, alpha=0.15, linewidth=1)
            loss.plot(steps, plain, color=PLAIN, linewidth=3.5, alpha=0.6, label="all-reduce")
            loss.plot(steps, ours, color=OURS, linewidth=1.6, label="DynamiQ")
            loss.set(ylabel="training loss (nats per byte)")
            bits = f"{self.traffic.bits_per_coordinate:.2f}"
            loss.set_title(f"The same training run at {bits} instead of 32 bits per coordinate", loc="left")
            loss.legend(frameon=False)
            gap.axhline(0, color=PLAIN, linewidth=1)
            gap.plot(steps, [b / a - 1 for a, b in zip(plain, ours, strict=True)], color=OURS, linewidth=1.6)
            gap.set(xlabel="step", ylabel="difference", xlim=(1, max(2, len(plain))))
            gap.yaxis.set_major_formatter(PercentFormatter(1.0))
            figure.supxlabel(
                f"validation loss {self.allreduce.validation_loss:.4f} and {self.dynamiq.validation_loss:.4f}"
                f" ({self.difference:+.2%}) · {self.ranks} ranks · {self.parameters / 1e6:.1f} million parameters",
                fontsize=9,
                color=PLAIN,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=160)


def smooth(values: Sequence[float], memory: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    total, weight, result = 0.0, 0.0, []
    for value in values:
        total, weight = memory * total + value, memory * weight + 1
        result.append(total / weight)
    return result


def _yes(value: bool) -> str:
    return "[green]yes[/green]" if value else "[bold red]NO[/bold red]"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def _milliseconds(run: Run) -> str:
    return f"{1e3 * statistics.median(run.step_seconds):.0f} ms"
