"""The figures of the explanation pages can be drawn again, and the tables in the pages are what the scripts measure."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")

DOCS = Path(__file__).parent
NUMBER = re.compile(r"\d+(\.\d+)?")
OUTLINE = re.compile(r' d="([^"]*)"')


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, ...]]]:
    """The folder with new figures, and the rows of all tables."""
    sys.path.insert(0, str(DOCS / "figures"))
    try:
        import draw
    finally:
        sys.path.pop(0)
    folder = tmp_path_factory.mktemp("figures")
    return folder, draw.main(folder)


def test_figures_are_committed(drawn: tuple[Path, list[tuple[str, ...]]]) -> None:
    folder, _ = drawn
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (DOCS / "images").glob("*.svg"))
    for path in folder.iterdir():
        new, old = (outlines(each) for each in (path, DOCS / "images" / path.name))
        assert len(new) == len(old) > 100, path.name
        # Another CPU's rounding moves few of the points by more than the width of a line.
        moved = sum(abs(a - b) > 3 for a, b in zip(new, old, strict=True))
        assert moved < 0.02 * len(new), path.name


def outlines(path: Path) -> list[float]:
    """All coordinates of a drawing, in points."""
    return [float(number) for line in OUTLINE.findall(path.read_text()) for number in re.findall(r"-?[\d.]+", line)]


def test_tables_are_measured(drawn: tuple[Path, list[tuple[str, ...]]]) -> None:
    """Every row that a script prints stands in a page, to within what another CPU's rounding may change."""
    rows = [
        tuple(cell.strip() for cell in line.strip("| \n").split("|"))
        for page in (DOCS / "explanation").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]
    for measured in drawn[1]:
        assert any(alike(row, measured) for row in rows), f"in no page: | {' | '.join(measured)} |"


def alike(row: tuple[str, ...], measured: tuple[str, ...]) -> bool:
    """Equal words, and numbers within 15 per cent, as other random numbers may change them."""
    return len(row) == len(measured) and all(
        float(said) == pytest.approx(float(found), rel=0.15)
        if NUMBER.fullmatch(found) and NUMBER.fullmatch(said)
        else said == found
        for said, found in zip(row, measured, strict=True)
    )
