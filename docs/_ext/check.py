"""Checks a built site: every link within it leads somewhere, and nothing is fetched from elsewhere.

python docs/_ext/check.py docs/_build/html
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pfedme

FETCHED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches by itself."""


class Page(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes an element's id, and its href or src."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)
                if (tag, name) in FETCHED:
                    self.fetched.append(value)


def problems(site: Path) -> list[str]:
    """What is wrong with a site, a line each."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = [
        f"{path.relative_to(site.resolve())}: {why}"
        for path, page in pages.items()
        for why in (*dead(path, page, pages), *(f"fetches {u}" for u in page.fetched if away(u)))
    ]
    found += [f"{path.name}: fetches {url}" for path in site.rglob("*.css") for url in fetched_by_style(path)]
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    found += [f"pfedme.{name} is on no page" for name in pfedme.__all__ if f"pfedme.{name}" not in anchors]
    return sorted(found)


def away(url: str) -> bool:
    """Whether an address is outside the site."""
    return bool(urlsplit(url).scheme not in ("", "data") or url.startswith("//"))


def dead(path: Path, page: Page, pages: dict[Path, Page]) -> list[str]:
    """The links of a page that lead nowhere."""
    return [f"dead link {url}" for url in page.links if not away(url) and not leads(path, url, pages)]


def leads(path: Path, url: str, pages: dict[Path, Page]) -> bool:
    """Whether there is something at the end of a link."""
    parts = urlsplit(url)
    if parts.scheme == "data":
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target not in pages or anchor in pages[target].anchors


def fetched_by_style(path: Path) -> list[str]:
    """What a style sheet fetches from elsewhere."""
    return [url for url in re.findall(r"url\(['\"]?([^'\")]+)", path.read_text()) if away(url)]


def main(site: Path) -> int:
    """Prints what is wrong; the status is 1 if anything is."""
    found = problems(site)
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, and every link leads somewhere.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
