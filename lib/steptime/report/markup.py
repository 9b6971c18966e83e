"""Pieces of HTML that the report's pages share: figures, tables, links, numbers."""

import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import numpy as np
import pandas as pd
from bs4 import BeautifulSoup, Tag
from markupsafe import Markup, escape

from steptime.report.style import THEME

_NUMBER = re.compile(r"[-+−]?[\d\s,]*\.?\d+([eE][-+]?\d+)?\s*%?|nan|NaN|inf|–|")
_LONG_CELL = 26
_SCROLL = {"class": "scroll", "tabindex": "0", "role": "region"}


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for people: significant digits, thousands apart, no exponent between 1e-4 and 1e9; missing is a dash."""
    if value is None or pd.isna(value):
        return "–"
    if isinstance(value, int | np.integer):
        return _apart(value, 0)
    size = abs(value)
    if not math.isfinite(value) or size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.{digits - 1}e}"
    return _apart(value, _decimals(value, digits))


def exact(value: float | None) -> str:
    """A number as it was published: no zeros added."""
    return "–" if value is None else f"{value:,.10g}".replace(",", "\u202f")


def share(value: float | None) -> str:
    """A share between 0 and 1 as a percentage, bold above a half."""
    if value is None or pd.isna(value):
        return "–"
    text = f"{100 * value:.1f} %"
    return Markup("<strong>{}</strong>").format(text) if value > 0.5 else text


def lead(text: str, length: int = 240) -> str:
    """The first parts of a long text, for who wants no more; the whole text where it is not long."""
    if len(text) <= length:
        return text
    end = max(text.rfind(mark, 0, length) for mark in ("; ", ". ", ", ", " "))
    return text[:end].rstrip(";., ") + " …"


def coded(text: str) -> Markup:
    """A docstring's text: what stands between backticks is code."""
    return Markup(re.sub("`+([^`]+)`+", r"<code>\1</code>", str(escape(text))))


def figure(svg: str, label: str, key: str) -> str:
    """An SVG file's text as part of a page: its colours follow the page's, its ids are `key`'s own.

    A figure that was not drawn in the study's style stays on white paper.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    width = _points(body)
    head = f'<svg viewBox="{_view_box(body)}" role="img" aria-label="{escape(label)}">'
    body = head + body[body.index(">") + 1 :]
    body = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', body)
    body = re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{key}-\2", body)
    is_ours = THEME["ink"][0] in body
    if is_ours:
        for name, (light, _) in THEME.items():
            body = body.replace(light, f"var(--{name.replace('_', '-')})")
        body = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", body)
        # the paper of figure and axes is the page's, whose shadows tell that there is more to scroll to
        body = body.replace('style="fill: var(--paper)"', 'style="fill: none"')
    paper = "" if is_ours else " on-paper"
    body = _lean(re.sub(r"\n\s*", "\n", body).strip(), key)
    # a narrow figure grows where there is room; on a phone, a wide one is scrolled rather than too small to read
    size = f"max-width: {max(width, min(1.35 * width, 640)):.0f}px; min-width: {0.75 * width:.0f}px"
    return (
        f'<div class="scroll figure{paper}" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<div style="{size}">{body}</div></div>'
    )


def _lean(svg: str, key: str) -> str:
    """The drawing in fewer bytes: a style that comes again is a class, ids are those that something refers to, and
    coordinates have two decimals (a pixel has none)."""
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found.group() if found.group(1) in wanted else "", svg)
    svg = re.sub(r"(?<=[ \n\"(,\-])(\d+\.\d{2})\d+", r"\1", svg)
    counts = Counter(re.findall(r' style="([^"]*)"', svg))
    names = {style: f"{key}-{place}" for place, style in enumerate(sorted(counts)) if counts[style] > 2}
    for style, name in names.items():
        svg = svg.replace(f' style="{style}"', f' class="{name}"')
    rules = "".join(f"svg .{name}{{{style}}}" for style, name in names.items())
    place = svg.index(">") + 1
    return f"{svg[:place]}<style>{rules}</style>{svg[place:]}" if rules else svg


def table(rows: pd.DataFrame, caption: str = "") -> str:
    """A dataframe as a table; a column named NAME_s holds seconds and is shown in ms; numbers are right-aligned."""
    columns = [column(str(name), rows[name]) for name in rows.columns]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns)
    lines = zip(*(cells for _, cells in columns), strict=True)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    soup = BeautifulSoup(f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", "html.parser")
    tidy_tables(soup)
    return str(soup)


def tidy_tables(soup: BeautifulSoup) -> None:
    """Give every table its own scroll box and align its numbers; drop pandas' border, style and plain row numbers."""
    for style in soup.find_all("style"):
        style.decompose()
    for place, found in enumerate(soup.find_all("table"), start=1):
        found.attrs.pop("border", None)
        found.attrs.pop("class", None)
        _drop_row_numbers(found)
        _join_heads(found)
        _align_numbers(found)
        _mark_cells(found)
        for empty in found.select("thead th"):
            if not empty.get_text().strip():
                empty.name = "td"  # it heads nothing
        caption = found.find("caption")
        label = caption.get_text() if caption else f"Table {place}"
        found.wrap(soup.new_tag("div", attrs=_SCROLL | {"aria-label": label}))


def faults(folder: Path, pages: list[Path]) -> list[str]:
    """What would not work from disk with the network off: links without target, resources that need the network."""
    read = {path: _Links.of(path) for path in pages}
    found = []
    for path, links in read.items():
        name = path.relative_to(folder)
        for kind, target in links.targets:
            if target.startswith("data:"):
                continue
            if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
                if kind != "a":
                    found.append(f"{name}: <{kind}> needs the network: {target[:80]}")
                continue
            file, anchor = urldefrag(target)
            goal = (path.parent / unquote(file)) if file else path
            if not goal.is_file():
                found.append(f"{name}: link to {target!r} has no target")
            elif anchor and goal in read and anchor not in read[goal].ids:
                found.append(f"{name}: link to {target!r} has no such heading")
    return found


class _Links(HTMLParser):
    """Collects link and resource targets, and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.ids: set[str] = set()

    @classmethod
    def of(cls, path: Path) -> "_Links":
        parser = cls()
        parser.feed(path.read_text(encoding="utf-8"))
        return parser

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ("href", "src", "xlink:href") and value is not None:
                self.targets.append((tag, value))


def column(name: str, values: pd.Series) -> tuple[str, list[str]]:
    """Heading and cells of a column; its numbers share their decimals, so that the points are below each other."""
    label = name.replace("_", " ")
    if name.endswith("_s") and pd.api.types.is_numeric_dtype(values):
        label, values = f"{name[:-2].replace('_', ' ')}, ms", values * 1e3
    if pd.api.types.is_float_dtype(values):
        sizes = values.abs()[values != 0].dropna()
        if len(sizes) and sizes.max() < 1e9 and sizes.max() / sizes.min() < 1e4:
            decimals = _decimals(sizes.min(), 3)
            return label, ["–" if pd.isna(value) else _apart(value, decimals) for value in values]
    return label, [_cell(value) for value in values]


def _cell(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | float | np.number) or value is None:
        return number(value)  # type: ignore[arg-type]
    return value if isinstance(value, str) else str(value)


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits of `value`."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def _apart(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def _view_box(svg: str) -> str:
    return _attribute(svg, "viewBox") or f"0 0 {_points(svg)} {_points(svg, 'height')}"


def _points(svg: str, name: str = "width") -> float:
    """A length of the svg element in CSS pixels."""
    value = _attribute(svg, name) or "640"
    length = float(re.match(r"[\d.]*", value).group() or 640)  # type: ignore[union-attr]
    return length * 4 / 3 if value.endswith("pt") else length


def _attribute(svg: str, name: str) -> str | None:
    head = svg[: svg.index(">")]
    match = re.search(rf'\b{name}="([^"]*)"', head)
    return match.group(1) if match else None


def _drop_row_numbers(found: Tag) -> None:
    """A default index says nothing: remove it."""
    rows = found.select("tbody tr")
    first = [row.find("th") for row in rows]
    if not rows or any(cell is None or cell.get_text() != str(place) for place, cell in enumerate(first)):
        return
    for cell in first:
        cell.decompose()  # type: ignore[union-attr]
    for row in found.select("thead tr"):
        cell = row.find("th")
        if cell is not None and not cell.get_text().strip():
            cell.decompose()


def _join_heads(found: Tag) -> None:
    """pandas' two rows of headings, the columns' and the index', as one: no column is named in both."""
    rows = [row.find_all("th") for row in found.select("thead tr")]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]) or found.select("thead [colspan], thead [rowspan]"):
        return
    texts = [[cell.get_text().strip() for cell in row] for row in rows]
    index = len(found.select("tbody tr")[0].find_all("th")) if found.select("tbody tr") else 0
    if any(texts[1][index:]):
        return
    for above, below, upper, lower in zip(*rows, *texts, strict=True):
        # what the columns are is named beside what the rows are
        above.string = " / ".join(filter(None, (lower, upper)))
        below.decompose()
    found.select("thead tr")[1].decompose()


def _mark_cells(found: Tag) -> None:
    """Cells of many words may be broken, others are not; the first column stays in sight where no row shares it."""
    for cell in found.select("tbody td, tbody th"):
        if len(cell.get_text().strip()) > _LONG_CELL:
            cell["class"] = "long"
    first = [row.find(["th", "td"]) for row in found.select("tr")]
    is_short = all(cell is None or len(cell.get_text().strip()) <= _LONG_CELL for cell in first)
    if is_short and not found.select("[rowspan], [colspan]"):
        found["class"] = "held"


def _align_numbers(found: Tag) -> None:
    """Right-align the columns of data (not of row headings) that hold only numbers; counted from the right, because
    row headings may span rows."""
    rows = [row.find_all("td") for row in found.select("tbody tr")]
    heads = [row.find_all(["td", "th"]) for row in found.select("thead tr")]
    for column in range(1, max(map(len, rows), default=0) + 1):
        cells = [row[-column] for row in rows if column <= len(row)]
        texts = [cell.get_text().strip() for cell in cells]
        if any(texts) and all(_NUMBER.fullmatch(text) for text in texts):
            for cell in [*cells, *(head[-column] for head in heads if column <= len(head))]:
                cell["class"] = "number"
