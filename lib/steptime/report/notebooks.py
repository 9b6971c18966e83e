"""An executed notebook as a page of the report: prose with MathML, code folded away, figures and tables in the open."""

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import nbformat
import nbformat.reader
from bs4 import BeautifulSoup
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from steptime.core.errors import InputError
from steptime.core.files import read_text
from steptime.report import markup

TEMPLATES = Path(__file__).parent / "templates"
RESERVED = ("index", "planner", "claims", "campaigns", "glossary", "reference", "about")
_LONG_FORMULA = 40
_FIGURE_MARK = "steptime-figure-{}"


@dataclass(frozen=True)
class Heading:
    """An entry of the table of contents."""

    level: int
    id: str
    text: str


@dataclass(frozen=True)
class NotebookPage:
    """One executed notebook; `path` is data/reports/notebooks/NN_NAME.ipynb."""

    path: Path
    title: str
    lede: str
    body: str
    headings: tuple[Heading, ...] = field(default=())

    @property
    def stage(self) -> str:
        return self.path.stem.partition("_")[2]

    @property
    def number(self) -> int:
        return int(self.path.stem.partition("_")[0])

    @property
    def href(self) -> str:
        return f"{self.stage}.html"

    @cached_property
    def question(self) -> str:
        """The lede's first sentence, as text."""
        text = re.sub(r"\s+", " ", BeautifulSoup(self.lede, "html.parser").get_text()).strip()
        return re.split(r"(?<=[.?!]) (?=[A-Z])", text)[0]


def read_pages(folder: Path) -> list[NotebookPage]:
    """Every executed notebook in `folder`, in order. Raises InputError when there is none or one cannot be read."""
    paths = sorted(folder.glob("[0-9]*_*.ipynb"))
    if not paths:
        raise InputError(f"{folder}: holds no executed notebook; run `dvc repro summary` (or `make study`) first")
    return [read_page(path) for path in paths]


def read_page(path: Path) -> NotebookPage:
    """One executed notebook, rendered. Its first cell is `# title`, then the question."""
    try:
        notebook = nbformat.reads(read_text(path), as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError):
        raise InputError(f"{path}: is not a notebook; run its stage again") from None
    if path.stem.partition("_")[2] in RESERVED:
        raise InputError(f"{path}: the report has a page of that name already; rename the notebook")
    figures = _take_figures(notebook)
    html, _ = _exporter().from_notebook_node(notebook)
    soup = BeautifulSoup(html, "html.parser")
    title = soup.find("h1")
    if title is None:
        raise InputError(f"{path}: has no title; begin its first cell with `# title`")
    _tidy_links(soup)
    first = title.find_parent(class_="prose")
    text = title.get_text().strip()
    title.decompose()
    lede = first.decode_contents().strip() if first else ""
    if first:
        first.decompose()
    headings = _name_headings(soup)
    markup.tidy_tables(soup)
    for block in soup.find_all("pre"):
        block["tabindex"] = "0"
    return NotebookPage(path, text, lede, _put_figures(str(soup), figures, text, headings), tuple(headings))


class _Renderer(IPythonRenderer):
    """Formulas become MathML, so that no script is needed to see them."""

    def inline_math(self, body: str) -> str:
        # one that may be wider than a phone scrolls by itself; a short one stays on the text's baseline
        formula = convert(body)
        return f'<span class="formula-inline" tabindex="0">{formula}</span>' if len(body) > _LONG_FORMULA else formula

    def block_math(self, body: str) -> str:
        return f'<span class="formula scroll" tabindex="0">{convert(body, display="block")}</span>'

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")


def markdown(source: str) -> str:
    """Markdown as HTML."""
    return str(MarkdownWithMath(renderer=_Renderer(escape=False, exclude_anchor_links=True)).render(source))


class _Exporter(HTMLExporter):
    """nbconvert's `basic` pages with our cells: code folded, no prompts, nothing fetched."""

    def __init__(self) -> None:
        super().__init__(template_name="basic", raw_template=(TEMPLATES / "notebook.html").read_text(encoding="utf-8"))

    def markdown_html(self, source: str) -> str:
        return markdown(source)

    def default_filters(self) -> Any:
        yield from super().default_filters()
        yield ("markdown2html", self.markdown_html)


@cache
def _exporter() -> _Exporter:
    """One for all notebooks: compiling nbconvert's templates takes longer than rendering."""
    return _Exporter()


def _take_figures(notebook: Any) -> list[str]:
    """Replace every SVG output by a mark and return them: the HTML parsers on the way would change them."""
    figures: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            svg = output.get("data", {}).get("image/svg+xml")
            if svg is not None:
                output.data = nbformat.from_dict({"text/html": f"<p>{_FIGURE_MARK.format(len(figures))}</p>"})
                figures.append("".join(svg))
    return figures


def _put_figures(html: str, figures: list[str], title: str, headings: list[Heading]) -> str:
    for place, svg in enumerate(figures):
        mark = f"<p>{_FIGURE_MARK.format(place)}</p>"
        before = html[: html.index(mark)]
        section = next((item.text for item in reversed(headings) if f'id="{item.id}"' in before), title)
        html = html.replace(mark, markup.figure(svg, f"Figure {place + 1}: {section}", f"figure-{place + 1}"))
    return html


def _name_headings(soup: BeautifulSoup) -> list[Heading]:
    """Give headings ids from their words and return those of levels 2 and 3; a further h1 becomes an h2."""
    taken: set[str] = {"main", "contents"}
    found = []
    for heading in soup.find_all(["h1", "h2", "h3", "h4"]):
        if heading.name == "h1":
            heading.name = "h2"
        text = heading.get_text().strip()
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"
        name, copy = slug, 2
        while name in taken:
            name, copy = f"{slug}-{copy}", copy + 1
        taken.add(name)
        heading["id"] = name
        if heading.name in ("h2", "h3"):
            found.append(Heading(int(heading.name[1]), name, text))
    return found


def _tidy_links(soup: BeautifulSoup) -> None:
    """A link to a notebook or its text leads to its page; one to a data file, to the copy beside the page."""
    for link in soup.find_all("a", href=True):
        target = str(link["href"])
        match = re.fullmatch(r"(?:[\w./]*/)?\d+_(\w+)\.(?:ipynb|py)(#.*)?", target)
        if match:
            link["href"] = f"{match.group(1)}.html{match.group(2) or ''}"
        elif re.match(r"(\.\./)+data/", target):
            link["href"] = target[target.index("data/") :]
