"""What docs/check_site.py finds in a site that has one fault of every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent

FAULTY = """
<link rel="stylesheet" href="style.css">
<style>@import "https://a.example/a.css"; p { background: url(https://b.example/b.png) }</style>
<p id="here" style="background: url('gone.png')">text that says url(https://text.example)</p>
<img src="https://c.example/c.png" srcset="data:image/png;base64,AA== 1x, https://d.example/d.png 2x">
<a href="https://may.example/">elsewhere</a> <a href="#here">here</a> <a href="#there">there</a>
<a href="no.html">no</a>
"""

STYLE = """
/* @import "https://comment.example/"; */
@import url("https://e.example/e.css");
a { background: url( "data:image/svg+xml,<svg fill='none' x='url(%23a)'/>" ), url(https://f.example/f.png) }
b { background: url(index.html), url('gone.woff2') }
"""


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "check_site", raising=False)
    import check_site

    (tmp_path / "index.html").write_text(FAULTY)
    (tmp_path / "style.css").write_text(STYLE)
    return check_site.faults(tmp_path)


def test_every_fault_is_found_and_nothing_else(faults: list[str]) -> None:
    assert sorted(faults) == [
        "index.html: loads https://a.example/a.css",
        "index.html: loads https://b.example/b.png",
        "index.html: loads https://c.example/c.png",
        "index.html: loads https://d.example/d.png",
        "index.html: no anchor #there",
        "index.html: no file gone.png",
        "index.html: no file no.html",
        "style.css: loads https://e.example/e.css",
        "style.css: loads https://f.example/f.png",
        "style.css: no file gone.woff2",
    ]
