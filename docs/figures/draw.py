"""Draw every figure of the explanation pages, and print the tables in them: ``python docs/figures/draw.py``."""

from __future__ import annotations

from pathlib import Path

import bias
import chain
import hops
import prediction
import widths
from drawing import IMAGES


def main(folder: Path = IMAGES) -> list[tuple[str, ...]]:
    """Write the figures into a folder, and return the rows of all tables."""
    by_hops, left = hops.measure(), bias.measure()
    hops.draw(by_hops, folder / "hops.svg")
    bias.draw(left, folder / "bias.svg")
    widths.draw(widths.measure(), folder / "widths.svg")
    return [
        *hops.table(by_hops),
        *chain.table(chain.measure()),
        *bias.table(left),
        *widths.table(widths.worth()),
        *prediction.table(prediction.measure()),
    ]


if __name__ == "__main__":
    for row in main():
        print("|", " | ".join(row), "|")
