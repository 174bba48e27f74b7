"""Every Python block of the pages and READMEs runs, in the order of its page and in one namespace for each page.

Two comments, which readers do not see, may stand right before a block::

    <!-- run first:
    tensor = torch.randn(10)  # what the reader is expected to have
    -->

    <!-- not run: needs two GPUs -->

Blocks that show what they print are ``{testcode}`` and ``{testoutput}``, and run by Sphinx (``-b doctest``). A page's
process is the only rank of a Gloo group; what needs several ranks makes them as threads, or is the tutorial.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from dynamiq_core import wire
from dynamiq_ddp import frames

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts and path.name != "NOTE.md"
)
FENCE = re.compile(r"^( *)```python *\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
BEFORE = re.compile(r"<!-- (run first|not run):((?:(?!-->).)*)-->\s*\Z", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
ANY_PYTHON = re.compile(r"^ *```+ *(python|py|pycon)\b.*$", re.MULTILINE)


class Block(NamedTuple):
    """One block: where its code begins, what the reader sees, what comes first, and why it is not run."""

    line: int
    code: str
    first: str
    not_run: str | None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page."""
    found = []
    for fence in FENCE.finditer(text):
        comment = BEFORE.search(text, 0, fence.start())
        kind, said = comment.groups() if comment else ("", "")
        found.append(
            Block(
                line=text.count("\n", 0, fence.start(2)),
                code=re.sub(f"^{fence[1]}", "", fence[2], flags=re.MULTILINE),
                first=said if kind == "run first" else "",
                not_run=said.strip() if kind == "not run" else None,
            )
        )
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> object:
    """A default process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=name)
def test_blocks_run(page: Path, alone: object) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page.read_text()):
        if block.not_run is not None:
            assert block.not_run, f"{name(page)}:{block.line}: a block that is not run must say why"
            compile(block.code, f"{name(page)}:{block.line}", "exec")
            continue
        exec(compile(block.first, f"{name(page)}: before line {block.line}", "exec"), namespace)
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_is_missed(page: Path) -> None:
    """A fence that is spelled in another way would silently not be run."""
    text = page.read_text()
    assert len(ANY_PYTHON.findall(text)) == len(blocks(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_named_exists(page: Path) -> None:
    text = page.read_text()
    paths = {match.rstrip(".") for match in re.findall(r"\b(?:packages|docs)/[\w./-]+\b/?", text)}
    missing = [path for path in sorted(paths) if not (ROOT / path).exists() and not path.startswith("docs/_build")]
    assert not missing
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    assert set(re.findall(r"nox -s \"?(\w+)", text)) <= sessions


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    """Sphinx follows those of its own pages; READMEs are read where they lie."""
    targets = [target for target in LINK.findall(page.read_text()) if not target.startswith(("https://", "http://"))]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_rows_of_a_table_have_its_columns(page: Path) -> None:
    """A bar inside a cell, even in code, begins the next cell, and what does not fit into a row is dropped."""
    table: list[str] = []
    for line in page.read_text().splitlines():
        table = [*table, line] if ROW.match(line) else []
        assert not table or line.count("|") == table[0].count("|"), line


def test_versions_are_the_current_ones() -> None:
    """A format that changes takes its page along, and the messages that pages show."""
    page = (ROOT / "docs/explanation/wire-format.md").read_text()
    assert re.findall(r"^Version (\d+)", page, re.MULTILINE) == [str(wire.VERSION)]
    assert f"| 2 | version of the header, {frames.VERSION} |" in page
    shown = [version for path in PAGES for version in re.findall(r"\bwire=(\d+)", path.read_text())]
    assert set(shown) == {str(wire.VERSION)}
