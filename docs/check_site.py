"""Follow every link inside the built site, and see that no page needs a network.

    python docs/check_site.py docs/_build/html

Sphinx checks references while it builds. This looks at what came out: files, anchors, pictures, scripts and styles.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page offers as anchors, what it points at, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
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


def faults(site: Path) -> list[str]:
    """Everything that leads nowhere or outside, as ``page: target``."""
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in sorted(page.links | page.loads):
            scheme, host, file, _, anchor = urlsplit(target)
            if scheme or host:
                if target in page.loads and scheme != "data":
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
    print("\n".join(found) or "every link leads somewhere, and no page needs a network")
    sys.exit(bool(found))
