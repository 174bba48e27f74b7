"""A thing has one name, spelled in one way, in pages, docstrings, messages and identifiers: that of the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = {".html", ".md", ".py", ".toml"}
FOLDERS = ("docs", "examples", "packages")
FILES = [
    path
    for path in sorted([*ROOT.glob("*.*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))])
    if path.suffix in SUFFIXES and not {"_build", Path(__file__).name, "NOTE.md"} & set(path.parts)
]

SPELLINGS = {
    "super-group": r"super ?groups?",
    "group": r"(micro|mini|scale)[- ]groups?",
    "bit width": r"bit-?widths?|bit[- ]depths?",
    "budget": r"bit[- ]budgets?|bit[- ]?rates?",
    "slot": r"time[- ]?slots?",
    "all-reduce": r"all reduces?",
    "quantise": r"(re|de)?-?quantiz(e|ed|er|ers|es|ing)|(re|de)-quanti\w*",
    "decompress, recompress": r"(de|re)-compress\w*",
    "backend": r"back[- ]ends?",
}
"""What is meant, and how it is not to be spelled."""


@pytest.mark.parametrize("term", SPELLINGS)
def test_no_other_spelling(term: str) -> None:
    other = re.compile(rf"\b({SPELLINGS[term]})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in other.finditer(line)
    ]
    assert not found


def test_files_are_looked_at() -> None:
    assert {"README.md", "protocol.py", "glossary.md", "phases.html"} <= {path.name for path in FILES}


def test_every_term_is_in_the_glossary() -> None:
    defined = re.findall(r"^(\S.*)\n  ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = "super-group, group, bit width, budget, chunk, slot, hop, schedule, transport, codec"
    assert set(words.split(", ")) <= set(", ".join(defined).split(", "))
    assert words in (ROOT / "CONTRIBUTING.md").read_text()
