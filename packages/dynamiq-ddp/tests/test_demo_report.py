"""The demo's table, picture and JSON."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from rich.console import Console

from dynamiq_ddp.demo.report import Report, Traffic, smooth
from dynamiq_ddp.demo.train import Run
from dynamiq_ddp.pictures import OURS, PLAIN


def report(*, identical: bool = True) -> Report:
    losses = [5.5 - 0.1 * step for step in range(30)]
    plain = Run(losses, [0.4] * 30, validation_loss=2.0, vnmse=1e-15, replicas_identical=True)
    ours = Run(
        [x + 0.01 for x in losses], [0.5] * 30, validation_loss=2.005, vnmse=4.5678e-4, replicas_identical=identical
    )
    traffic = Traffic(bits_per_coordinate=4.987, bytes_per_step=3_000_000.4, codec_share=0.12, backend="numba")
    return Report(plain, ours, traffic, ranks=4, parameters=3_281_408, seconds=181.26)


def test_the_figures_are_rounded_to_what_they_are_worth() -> None:
    assert report(identical=False).figures() == {
        "loss_allreduce": 2.0,
        "loss_dynamiq": 2.005,
        "bits_per_coordinate": 4.987,
        "bytes_per_step": 3_000_000,
        "vnmse": 4.568e-4,
        "replicas_identical": False,
        "backend": "numba",
        "codec_seconds_per_step": 0.06,
        "seconds": 181.3,
    }


def test_ring_of_float32_sends_each_chunk_twice_but_for_one() -> None:
    # Four ranks: six messages of a quarter of the gradient each.
    assert report().plain_bytes_per_step == pytest.approx(6 * 3_281_408)


@pytest.mark.parametrize(("identical", "word"), [(True, "yes"), (False, "NO")])
def test_table_holds_the_figures(identical: bool, word: str) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(report(identical=identical).table())
    rows = [line.split("│")[1:4] for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = {name.strip(): (plain.strip(), ours.strip()) for name, plain, ours in rows}
    assert cells == {
        "validation loss (nats per byte)": ("2.0000", "2.0050"),
        "difference": ("", "+0.25%"),
        "bits on the wire per coordinate": ("32", "4.987"),
        "sent per step and rank": ("19.69 MB *", "3.00 MB"),
        "vNMSE of the last gradient": ("1.0e-15", "4.57e-04"),
        "replicas bit-identical": ("yes", word),
        "step time, median": ("400 ms", "500 ms"),
        "of which codec": ("", "12%"),
        "backend": ("", "numba"),
    }


def test_picture_shows_both_curves(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loss.png"
    report().plot(path)
    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 600
    for colour in (OURS, PLAIN):
        close = np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.02
        assert close.sum() > 100


def test_smoothing_keeps_constants_and_weighs_by_age() -> None:
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    assert smooth([0.0, 0.0, 1.0], memory=0.5) == pytest.approx([0.0, 0.0, 4 / 7])
