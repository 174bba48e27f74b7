"""What the figures share: colours for a light and for a dark page, and files that are equal when redrawn.

    python docs/figures/draw.py

redraws all of them into ``docs/images``.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "images"

TEXT = "#7d8590"
COLOURS = {"independent": "#c4762b", "correlated": "#8f6fd8", "dithered": "#2f8f7f"}

STYLE = {
    "svg.fonttype": "path",  # no font has to be installed where the page is read
    "svg.hashsalt": "dynamiq",  # ids that do not change from one drawing to the next
    "font.size": 10,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "text.color": TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def save(figure: Figure, path: Path) -> None:
    """Write an SVG without a background and without a date."""
    with rc_context(STYLE):
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
