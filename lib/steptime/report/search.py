"""The report's search index: what stands under each heading, as a script that a page loads when someone searches.

A page opened from disk may load a script beside it but may not fetch a file, so the index is an assignment.
"""

import json
import re
from collections.abc import Mapping

from bs4 import BeautifulSoup, NavigableString, Tag

INDEX_NAME = "search-index.js"
_DROPPED = "nav, form, pre, script, style, td.number, .code, .turn, .eyebrow"
_STARTS = ("h1", "h2", "h3", "tr")
Section = tuple[str, str, str]


def index_text(pages: Mapping[str, str]) -> str:
    """The script of pages given as name -> HTML: pages in their order, each with its title and sections."""
    index = [_page(name, html) for name, html in pages.items()]
    return f"globalThis.steptimeIndex = {json.dumps(index, ensure_ascii=False, separators=(',', ':'))};\n"


def _page(name: str, html: str) -> dict[str, object]:
    # drawings are most of a page and have nothing to read but labels: parsing them would take longest
    soup = BeautifulSoup(re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL), "html.parser")
    for unread in soup.select(_DROPPED):
        unread.decompose()
    sections = _sections(soup.select("main")[0])
    return {"href": name, "title": sections[0][1], "sections": sections}


def _sections(main: Tag) -> list[Section]:
    """(id, heading, text) from each heading or named row of a table to the next."""
    found: list[tuple[str, str, list[str]]] = []
    for node in main.descendants:
        if isinstance(node, Tag) and node.name in _STARTS and (node.name == "h1" or node.get("id")):
            found.append((str(node.get("id") or ""), _heading(node), []))
        elif isinstance(node, NavigableString) and found and not node.find_parent(["h1", "h2", "h3"]):
            found[-1][2].append(str(node))
    return [(name, heading, _words(" ".join(texts))) for name, heading, texts in found]


def _heading(start: Tag) -> str:
    """A claim's row is called by its claim."""
    named = start.select_one("[data-label=Claim]") if start.name == "tr" else start
    return _words((named or start).get_text(" "))


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
