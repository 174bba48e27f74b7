"""Follow every link inside the built site, and see that no page or style sheet loads anything from elsewhere.

    python docs/check_site.py docs/_build/html

Sphinx checks references while it builds. This looks at what came out: files, anchors, pictures, scripts and styles,
with what the styles import and show. It does not run scripts, which could load more.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
LOADED = re.compile(
    r"""url\(\s*(?:"([^"]*)"|'([^']*)'|([^"')\s]*))\s*\)|@import\s+(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE
)


class Page(HTMLParser):
    """What a page offers as anchors, what it points at, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and "href" in values:
            self.loads.add(values["href"])
        elif "src" in values:
            self.loads.add(values["src"])
        # Candidates end in a comma and a space; a comma alone may be part of an address.
        candidates = re.split(r",\s+", values.get("srcset", ""))
        self.loads.update(candidate.split()[0] for candidate in candidates if candidate.strip())
        self.loads |= loaded_by(values.get("style", ""))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads |= loaded_by(data)


def loaded_by(css: str) -> set[str]:
    """What a style sheet imports, and the files in it."""
    return {next(filter(None, target)) for target in LOADED.findall(COMMENT.sub("", css)) if any(target)}


def faults(site: Path) -> list[str]:
    """Everything that leads nowhere or outside, as ``page: target``."""
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    sheets = {path.resolve(): loaded_by(path.read_text()) for path in site.rglob("*.css")}
    found = []
    for path in (*pages, *sheets):
        name = path.relative_to(site.resolve())
        links, loads = (pages[path].links, pages[path].loads) if path in pages else (set(), sheets[path])
        for target in sorted(links | loads):
            scheme, host, file, _, anchor = urlsplit(target)
            if scheme or host:
                if target in loads and scheme != "data":
                    found.append(f"{name}: loads {target}")
                continue
            to = (path.parent / unquote(file)).resolve() if file else path
            if not to.is_file():
                found.append(f"{name}: no file {target}")
            elif anchor and to in pages and unquote(anchor) not in pages[to].anchors:
                found.append(f"{name}: no anchor {target}")
    return found if pages else [f"no pages in {site}"]


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]))
    print("\n".join(found) or "every link leads somewhere, and nothing is loaded from elsewhere")
    sys.exit(bool(found))
