"""The static report in data/reports: one page a notebook, the answers, the claims, the campaigns, the glossary, how
to cite it.

Pages hold all they need (styles, figures, formulas), so they open from disk with the network off.
"""

import gzip
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import steptime
from steptime.core.claims import Claim, Figure, Kind, Paper, Verdict, read_claims, read_paper
from steptime.core.errors import EXIT_STATUSES, InputError
from steptime.core.files import read_text, read_yaml, validated, write_text
from steptime.core.machine import Link, Machine, read_machine
from steptime.report import citation, markup, planner, provenance, reference, search
from steptime.report.notebooks import TEMPLATES, NotebookPage, markdown, read_pages
from steptime.report.provenance import Recorded
from steptime.report.style import THEME
from steptime.report.summary import QUESTIONS, Local, Summary, figure_path, read_local, read_summary

LARGEST_PAGE_BYTES = 2_000_000
LARGEST_SITE_BYTES = 20_000_000
COMPRESSED_OVER_BYTES = 50_000


@dataclass(frozen=True)
class LedgerRow:
    """A claim with its paper and the published figure."""

    claim: Claim
    paper: Paper
    figure: Figure
    study: str
    page: NotebookPage | None
    """The page of the notebook that wrote our figure's data."""


@dataclass(frozen=True)
class _Entry:
    """A page in the navigation."""

    href: str
    title: str
    group: str


_OVERVIEW, _EVIDENCE = "Overview", "Evidence"


def build_site(root: Path) -> list[Path]:
    """Build data/reports from the executed notebooks and derived data; return the pages written.

    All pages are rendered and checked in a scratch folder first, so a build that fails or is interrupted leaves the old
    site. Raises InputError when an input is missing (naming the stage to run), a link has no target or a page is
    larger than 2 MB, or all of it than 20 MB.
    """
    reports = root / "data" / "reports"
    content = _Content.read(root)
    (root / "data" / ".scratch").mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root / "data" / ".scratch", prefix="site-"))
    try:
        _copy_data(root, scratch, {row.claim.data for row in content.ledger})
        shutil.copytree(reports / "notebooks", scratch / "notebooks")
        texts = dict(_pages(content, scratch))
        for name, html in texts.items():
            write_text(scratch / name, html)
        write_text(scratch / search.INDEX_NAME, search.index_text(texts))
        pages = sorted(scratch.glob("*.html"))
        _check(scratch, pages)
        return _swap_in(scratch, reports, pages)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Content:
    """Everything that the pages are made from."""

    root: Path
    notebooks: list[NotebookPage]
    summary: Summary
    local: Local | None
    recorded: list[Recorded]
    ledger: list[LedgerRow]
    machines: list[Machine]
    links: list[Link]
    plan: dict[str, Any]
    """What the planner page is made of."""

    @classmethod
    def read(cls, root: Path) -> "_Content":
        notebooks = read_pages(root / "data" / "reports" / "notebooks")
        machines = [read_machine(path) for path in sorted((root / "data" / "machines").glob("*.yaml"))]
        links = [
            validated(Link, read_yaml(path), path) for path in sorted((root / "data" / "machines").glob("links/*.yaml"))
        ]
        recorded = provenance.recorded(root)
        ledger = read_ledger(root, notebooks)
        plan = planner.page_values(root / "data" / "derived" / "fit", links)
        return cls(root, notebooks, read_summary(root), read_local(root), recorded, ledger, machines, links, plan)


def read_ledger(root: Path, notebooks: Sequence[NotebookPage] = ()) -> list[LedgerRow]:
    """Every study's claims, each with its published figure: what was decided first, what could not be decided here
    last, in the order of the notebooks. Raises InputError when one has no source or no data.
    """
    pages = {page.stage: page for page in notebooks}
    papers = {paper.id: paper for paper in map(read_paper, sorted((root / "data" / "published").glob("*.yaml")))}
    folder = root / "data" / "derived" / "claims"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"{folder}: holds no claims; run `steptime run summary` (or `dvc repro summary`) first")
    rows = []
    for path in paths:
        for place, claim in enumerate(read_claims(path), start=1):
            where = f"{path}: row {place}"
            paper = papers.get(claim.paper)
            if paper is None:
                raise InputError(f"{where}: paper = {claim.paper!r}: is not in data/published; add its file")
            figure = next((item for item in paper.figures if item.id == claim.figure), None)
            if figure is None:
                raise InputError(f"{where}: figure = {claim.figure!r}: is not in {paper.id}.yaml; add it there")
            if not (root / claim.data).is_file():
                raise InputError(f"{where}: data = {claim.data!r}: no such file; run the study again")
            rows.append(LedgerRow(claim, paper, figure, path.stem, pages.get(Path(claim.data).parts[2])))
    undecided = ("unverified source", "needs a GPU")
    return sorted(
        rows,
        key=lambda row: (
            undecided.index(row.claim.verdict) + 1 if row.claim.verdict in undecided else 0,
            row.page.number if row.page else 100,
        ),
    )


def _pages(content: _Content, scratch: Path) -> Iterator[tuple[str, str]]:
    environment = _environment()
    nav = _navigation(content)
    groups = {name: [entry for entry in nav if entry.group == name] for name in dict.fromkeys(e.group for e in nav)}
    files = {"style": "style.css", "search": "search.js"}
    shared = {"groups": groups, "theme": THEME} | {
        name: Markup(read_text(TEMPLATES / file)) for name, file in files.items()
    }

    def render(template: str, href: str, **values: Any) -> tuple[str, str]:
        place = [entry.href for entry in nav].index(href)
        around = {
            "previous": nav[place - 1] if place else None,
            "next": nav[place + 1] if place + 1 < len(nav) else None,
        }
        return href, environment.get_template(template).render(here=nav[place], **shared, **around, **values)

    yield render("index.html", "index.html", **_index(content, scratch))
    yield render("planner.html", "planner.html", **content.plan)
    for page in content.notebooks:
        used = provenance.campaigns_of(page.stage, content.root, content.recorded)
        data = [path for path in _data_files(scratch) if path.startswith(f"data/derived/{page.stage}/")]
        yield render("page.html", page.href, page=page, body=Markup(page.body), used=used, data=data)
    ledger = {"rows": content.ledger, "verdicts": get_args(Verdict), "kinds": get_args(Kind)}
    script = Markup(read_text(TEMPLATES / "ledger.js"))
    yield render("claims.html", "claims.html", **ledger, counts=_counts(content), script=script)
    machines = {"machines": content.machines, "links": content.links}
    yield render("campaigns.html", "campaigns.html", recorded=content.recorded, **machines)
    yield render("glossary.html", "glossary.html", verdicts=get_args(Verdict))
    changes = read_text(content.root / "CHANGELOG.md").partition("\n")[2]
    about = {"cited": citation.read(content.root / "CITATION.cff"), "statuses": EXIT_STATUSES}
    source = Path(steptime.__file__).parent
    yield render("reference.html", "reference.html", packages=reference.modules(source))
    yield render("about.html", "about.html", **about, changes=Markup(markdown(changes)))


def _index(content: _Content, scratch: Path) -> dict[str, Any]:
    summary = content.summary
    figures = {}
    for place, name in enumerate(summary.figures, start=1):
        label = next((answer.text for answer in summary.answers if answer.figure == name), summary.question)
        figures[name] = Markup(markup.figure(read_text(figure_path(content.root, name)), label, f"figure-{place}"))
    asked = [
        (
            question,
            [answer for answer in summary.answers if answer.question == question.key],
            [page for page in content.notebooks if page.number in question.numbers],
        )
        for question in QUESTIONS
    ]
    return {
        "summary": summary,
        "asked": [item for item in asked if item[1] or item[2]],
        "figures": figures,
        "table": Markup(markup.table(summary.headline.frame())) if summary.headline else "",
        **_local(content),
        "stages": {page.stage for page in content.notebooks},
        "counts": _counts(content),
        "recorded": content.recorded,
        "data": _by_folder(_data_files(scratch)),
    }


def _counts(content: _Content) -> list[tuple[str, int]]:
    """(verdict, number of claims), those that occur."""
    counts = Counter(row.claim.verdict for row in content.ledger)
    return [(verdict, counts[verdict]) for verdict in get_args(Verdict) if counts[verdict]]


def _local(content: _Content) -> dict[str, Any]:
    local = content.local
    if local is None:
        return {"local": None}
    svg = read_text(figure_path(content.root, local.figure))
    return {
        "local": local,
        "local_figure": Markup(markup.figure(svg, "Measured on this machine", "figure-local")),
        "local_table": Markup(markup.table(local.frame())),
    }


def alone(title: str, lede: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page of its own, that no other links to; `sections` are headings with their HTML."""
    shared = {"theme": THEME, "style": Markup(read_text(TEMPLATES / "style.css"))}
    return _environment().get_template("alone.html").render(title=title, lede=lede, sections=sections, **shared)


def _navigation(content: _Content) -> list[_Entry]:
    """Every page in reading order: the answers, then by question, then what they rest on."""
    of_question = {number: question.title for question in QUESTIONS for number in question.numbers}
    pages = [_Entry(page.href, page.title, of_question.get(page.number, _OVERVIEW)) for page in content.notebooks]
    order = [_OVERVIEW, *(question.title for question in QUESTIONS)]
    return [
        _Entry("index.html", "Questions and answers", _OVERVIEW),
        _Entry("planner.html", "Planner", _OVERVIEW),
        *sorted(pages, key=lambda entry: order.index(entry.group)),
        _Entry("claims.html", "Claims", _EVIDENCE),
        _Entry("campaigns.html", "Machines and campaigns", _EVIDENCE),
        _Entry("glossary.html", "Glossary", _EVIDENCE),
        _Entry("reference.html", "Functions", _EVIDENCE),
        _Entry("about.html", "Citing, exit statuses, changes", _EVIDENCE),
    ]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = markup.number
    environment.globals |= {"number": markup.number, "exact": markup.exact, "share": markup.share}
    environment.filters["lead"] = markup.lead
    environment.filters["coded"] = markup.coded
    environment.filters["css_name"] = lambda name: name.replace("_", "-")
    environment.filters["slug"] = lambda text: text.replace(" ", "-").lower()
    environment.filters["table"] = lambda rows, caption="": Markup(markup.table(rows, caption))
    return environment


def _copy_data(root: Path, scratch: Path, linked: set[str]) -> None:
    """Copy the tables that the pages link to, under the same names as in the checkout. Runs and samples are compressed,
    and large timelines and derived tables that no claim is `linked` to: a site is to be small.
    """
    wanted = [
        "derived/**/*.csv",
        "derived/**/*.json",
        "campaigns/*/*.csv",
        "campaigns/*/*.json",
        "raw/local/*.csv",
        "published/*.*",
    ]
    for pattern in [*wanted, "machines/**/*.yaml"]:
        for path in sorted((root / "data").glob(pattern)):
            target = scratch / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            is_table = path.suffix == ".csv" and ("derived" in path.parts or path.name == "timelines.csv")
            is_large = is_table and path.stat().st_size > COMPRESSED_OVER_BYTES
            is_large &= path.relative_to(root).as_posix() not in linked
            if path.name in ("runs.csv", "samples.csv") or is_large:
                target.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            else:
                shutil.copyfile(path, target)


def _data_files(scratch: Path) -> list[str]:
    return sorted(path.relative_to(scratch).as_posix() for path in (scratch / "data").rglob("*") if path.is_file())


def _by_folder(files: list[str]) -> dict[str, list[str]]:
    """Files by the first folder below data/."""
    folders: dict[str, list[str]] = {}
    for path in files:
        folders.setdefault(path.split("/")[1], []).append(path)
    return folders


def _check(scratch: Path, pages: list[Path]) -> None:
    found = markup.faults(scratch, pages)
    if found:
        raise InputError(f"report: {found[0]} ({len(found)} such); mend it in the notebook or the claims")
    for page in pages:
        size = page.stat().st_size
        if size >= LARGEST_PAGE_BYTES:
            raise InputError(f"report: {page.name}: {size / 1e6:.1f} MB, over 2 MB; print or draw less in its notebook")
    total = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    if total >= LARGEST_SITE_BYTES:
        raise InputError(f"report: {total / 1e6:.1f} MB in all, over 20 MB; draw less, or take a campaign out")


def _swap_in(scratch: Path, reports: Path, pages: list[Path]) -> list[Path]:
    """Put the finished site in place, the index last; pages of notebooks that are gone go too."""
    old = scratch / "old-data"
    if (reports / "data").exists():
        (reports / "data").rename(old)
    (scratch / "data").rename(reports / "data")
    os.replace(scratch / search.INDEX_NAME, reports / search.INDEX_NAME)
    new = {page.name for page in pages}
    for page in sorted(pages, key=lambda path: path.name == "index.html"):
        os.replace(page, reports / page.name)
    for page in reports.glob("*.html"):
        if page.name not in new:
            page.unlink()
    return [reports / name for name in sorted(new)]
