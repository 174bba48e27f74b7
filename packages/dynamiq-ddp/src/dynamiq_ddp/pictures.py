"""How pictures of results look: for `matplotlib.rc_context`, without importing matplotlib."""

from __future__ import annotations

from typing import Any

PLAIN, OURS = "#5b6770", "#d1495b"
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": "#9aa4ab",
    "axes.titleweight": "bold",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": "#e6e9eb",
    "font.size": 10.5,
}
