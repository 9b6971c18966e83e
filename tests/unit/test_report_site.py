"""The static report, built from planted inputs: complete, self-contained, byte-stable, whole or not at all."""

import gzip
import hashlib
import html
import json
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from planted_report import _speed_ups, claims, plant, summary

from steptime.core.errors import InputError
from steptime.report import figures, markup, reference, site, style
from steptime.report.notebooks import read_page
from steptime.report.site import build_site
from steptime.report.summary import QUESTIONS

PAGES = ["about", "campaigns", "claims", "glossary", "index", "measure", "planner", "predict", "reference", "summary"]
WITH_NUMBERS = ("index", "measure", "predict", "summary")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted checkout with its report; not to be changed."""
    root = plant(tmp_path_factory.mktemp("built"))
    build_site(root)
    return root


@pytest.fixture
def checkout(built: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    shutil.copytree(built, tmp_path / "copy")
    return tmp_path / "copy"


def test_there_is_a_page_for_each_notebook_and_they_are_found_from_each(built: Path) -> None:
    reports = built / "data" / "reports"
    assert sorted(path.stem for path in reports.glob("*.html")) == PAGES
    for page in PAGES:
        soup = _soup(built, page)
        side = soup.select_one("nav.side")
        assert {link["href"] for link in side.select("a")} == {f"{name}.html" for name in PAGES}
        assert side.select_one("[aria-current]")["href"] == f"{page}.html"
        assert soup.html["lang"] == "en"
        assert len(soup.select("h1")) == len(soup.select("main")) == 1
        assert soup.select_one("a.skip")["href"] == "#main"


def test_the_search_index_has_every_page_and_heading_and_no_code(built: Path) -> None:
    text = (built / "data" / "reports" / "search-index.js").read_text(encoding="utf-8")
    assert text.startswith("globalThis.steptimeIndex = [")
    index = json.loads(text.removeprefix("globalThis.steptimeIndex = ").removesuffix(";\n"))
    assert sorted(page["href"] for page in index) == [f"{name}.html" for name in PAGES]
    for page in index:
        soup = _soup(built, page["href"].removesuffix(".html"))
        names = [name for name, _, _ in page["sections"]]
        assert names[0] == ""
        assert page["title"] == re.sub(r"\s+", " ", soup.h1.get_text(" ")).strip()
        wanted = [heading["id"] for heading in soup.select("main :is(h2, h3)[id]") if not heading.find_parent("nav")]
        assert set(wanted) <= set(names)
        assert "script" not in names
    claimed = next(page for page in index if page["href"] == "claims.html")["sections"]
    assert [heading for _, heading, _ in claimed][1 : 1 + len(claims())] == [claim["claim"] for claim in claims()]
    assert "import " not in next(page for page in index if page["href"] == "measure.html")["sections"][0][2]


def test_pages_need_nothing_but_their_folder(built: Path) -> None:
    reports = built / "data" / "reports"
    pages = sorted(reports.glob("*.html"))
    assert markup.faults(reports, pages) == []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(text.encode()) < 2_000_000
        outside = re.findall(r'<(?!a\b)\w+[^>]*?(?:src|href)="(?:https?:)?//[^"]*|url\((?!#)[^)]*\)|@import', text)
        assert outside == []
        assert str(built) not in text


def test_a_second_build_gives_the_same_bytes(checkout: Path) -> None:
    before = _hashes(checkout)
    build_site(checkout)
    assert _hashes(checkout) == before


def test_formulas_are_mathml_and_code_is_folded(built: Path) -> None:
    soup = _soup(built, "predict")
    article = soup.select_one("article")
    assert "$" not in article.get_text()
    assert article.select_one('math[display="block"] mfrac')
    assert soup.select_one(".lede math")
    assert all(block.find_parent("details") for block in article.select(".highlight"))
    assert not article.select("details[open]")
    assert "Parameters of this run" in article.get_text()


def test_links_between_notebooks_and_to_data_become_links_of_the_site(built: Path) -> None:
    links = {link["href"] for link in _soup(built, "predict").select("article a")}
    assert {"measure.html", "data/derived/predict/speed_up.csv", "glossary.html#symbols"} <= links


def test_the_ledger_shows_each_claim_with_its_paper_figures_verdict_and_data(built: Path) -> None:
    rows = _soup(built, "claims").select("#ledger tbody tr")
    assert len(rows) == len(claims())
    for row, claim in zip(rows, claims(), strict=True):
        text = re.sub(r"\s+", " ", row.get_text(" "))
        assert claim["claim"] in text
        assert claim["why"] in text
        assert claim["tolerance"] in text
        assert row["data-verdict"] == claim["verdict"] == row.select_one(".chip").get_text()
        assert row["data-kind"] == claim["kind"]
        links = ["https://example.org/planted", "predict.html", claim["data"], "data/published/planted2018.yaml"]
        assert [link["href"] for link in row.select("a")] == links
        published, ours = row.select("td.number")
        assert published["data-value"] == ("" if claim["published"] is None else str(claim["published"]))
        assert ours["data-value"] == ("" if claim["ours"] is None else str(claim["ours"]))
        if claim["ours"] is not None:
            assert markup.number(claim["ours_lo"]) in ours.get_text()


def test_campaigns_show_what_did_not_run_what_was_disturbed_and_which_is_local(built: Path) -> None:
    soup = _soup(built, "campaigns")
    labels = {head.contents[0].strip(): head.select_one(".chip").get_text() for head in soup.select("h2:has(.chip)")}
    assert labels == {"planted-laptop": "committed", "local": "this machine"}
    text = soup.get_text(" ")
    assert "no GPU on this machine" in text
    assert "5.0 %" in text
    assert "0123456789" in text


def test_each_page_says_which_campaigns_it_shows(built: Path) -> None:
    named = {page: [link.get_text() for link in _soup(built, page).select(".origin a")] for page in WITH_NUMBERS}
    both = ["planted-laptop", "local"]
    assert named == {"index": both, "measure": ["local"], "predict": ["planted-laptop"], "summary": both}


def test_the_index_gives_question_answers_headline_and_counts(built: Path) -> None:
    soup = _soup(built, "index")
    assert soup.h1.get_text().startswith("What does one training step cost")
    asked = soup.select("section.answer")
    assert [section.h2.get_text().strip()[2:] for section in asked[:2]] == [item.text for item in QUESTIONS[:2]]
    first, second = summary()["answers"][0], summary()["answers"][2]
    assert asked[0].select_one(".said").get_text() == first["text"]
    assert asked[1].select_one(".said").get_text() == second["text"]
    assert asked[0].select_one(".headline svg")
    assert asked[1].select_one("svg")
    assert len(asked) == 2  # nothing planted is about the third question
    cells = [cell.get_text() for cell in soup.select(".headline tbody tr:first-child td")]
    assert cells == ["mlp", "32", "2.10", "2.56"]
    assert [link["href"] for link in soup.select(".cards a")] == ["measure.html", "predict.html"]
    assert sum(int(count.get_text()) for count in soup.select(".counts b")) == len(claims())


def test_this_machine_is_shown_apart_and_only_where_it_was_measured(checkout: Path) -> None:
    assert not _soup(checkout, "index").select("#this-machine")
    local = {
        "answers": ["Here lenet takes 9 ms (planted)."],
        "figure": "headline.svg",
        "columns": ["network", "torch_s"],
        "table": [{"network": "lenet", "torch_s": 0.009}],
        "caption": "One thread (planted).",
    }
    path = checkout / "data" / "derived" / "summary" / "local.json"
    path.write_text(json.dumps(local))
    build_site(checkout)
    block = _soup(checkout, "index").select_one("section:has(> #this-machine)")
    assert block.h2.get_text() == "This machine not part of the study"
    assert [item.get_text() for item in block.select("li")] == local["answers"]
    assert block.svg
    assert [cell.get_text() for cell in block.select("td")] == ["lenet", "9.00"]
    assert block.select_one("a[href='summary.html']")
    path.write_text(json.dumps(local | {"figure": "gone.svg"}))
    with pytest.raises(InputError, match=r"local.json: figure = 'gone.svg'"):
        build_site(checkout)


def test_an_answer_is_not_repeated_below_its_figure(built: Path) -> None:
    assert _soup(built, "index").main.get_text().count("merging keeps the speed-up") == 1


def test_no_unit_without_a_figure_and_small_units_are_written_small(checkout: Path) -> None:
    path = checkout / "data" / "derived" / "claims" / "planted.json"
    rows = json.loads(path.read_text())
    rows[0] |= {"published": 8.5e-10, "ours": None, "ours_lo": None, "ours_hi": None, "unit": "s/B"}
    path.write_text(json.dumps(rows))
    build_site(checkout)
    cells = [
        cell.get_text().strip() for cell in _soup(checkout, "claims").select_one("#ledger tbody tr").select(".number")
    ]
    assert cells == ["0.85 ns/B", "–"]


def test_mostly_disturbed_cases_are_marked_and_it_is_said_which_steps_count(checkout: Path) -> None:
    path = checkout / "data" / "campaigns" / "planted-laptop" / "samples.csv"
    samples = pd.read_csv(path)
    late = samples["repeat"] >= 8
    samples.loc[samples["run_id"].str.endswith("torch-mlp"), "is_disturbed"] = True
    samples.loc[samples["run_id"].str.endswith("torch-lenet") & late, "is_disturbed"] = True
    samples.to_csv(path, index=False)
    build_site(checkout)
    table = _soup(checkout, "campaigns").select_one("table")
    rows = [[cell.get_text() for cell in row.select("td")] for row in table.select("tbody tr")]
    place = [head.get_text() for head in table.select("th")].index("counted")
    counted = {(row[0], row[1]): row[place] for row in rows}
    assert counted["torch", "mlp"] == "all steps"
    assert counted["torch", "lenet"] == "calm steps, under half"
    assert counted["torch", "alexnet"] == "calm steps"
    assert [bold.get_text() for bold in table.select("td.number strong")] == ["80.0 %", "100.0 %"]


@pytest.mark.parametrize(
    ("lost", "stage"),
    [
        ("data/reports/notebooks", "make study"),
        ("data/derived/summary/summary.json", "run summary"),
        ("data/figures/summary/headline.svg", "run summary"),
        ("data/derived/claims/planted.json", "run summary"),
    ],
)
def test_a_missing_input_is_one_line_that_names_the_stage(checkout: Path, lost: str, stage: str) -> None:
    path = checkout / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(InputError, match=stage) as caught:
        build_site(checkout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("paper", "unknown1999"), ("figure", "unknown-figure"), ("data", "data/derived/none.csv")]
)
def test_a_claim_without_source_or_data_names_its_row(checkout: Path, key: str, value: str) -> None:
    path = checkout / "data" / "derived" / "claims" / "planted.json"
    rows = json.loads(path.read_text())
    rows[2][key] = value
    path.write_text(json.dumps(rows))
    with pytest.raises(InputError, match=f"row 3: {key} = '{value}'"):
        build_site(checkout)


def test_a_failed_or_interrupted_build_leaves_the_old_site(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _hashes(checkout)
    _append(checkout, "20_measure", "[gone](gone.html)")
    with pytest.raises(InputError, match=r"measure.html: link to 'gone.html' has no target"):
        build_site(checkout)
    written = []

    def interrupted(path: Path, text: str) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        path.write_text(text)

    monkeypatch.setattr(site, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_site(checkout)
    after = _hashes(checkout)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"notebooks/20_measure.ipynb"}
    assert set(after) == set(before)
    assert not list((checkout / "data" / ".scratch").iterdir())


def test_a_link_to_a_heading_that_is_not_there_is_found(checkout: Path) -> None:
    _append(checkout, "20_measure", "[gone](predict.html#gone)")
    with pytest.raises(InputError, match="no such heading"):
        build_site(checkout)


def test_a_picture_from_the_network_is_refused(checkout: Path) -> None:
    _append(checkout, "20_measure", "![x](https://example.org/x.png)")
    with pytest.raises(InputError, match="<img> needs the network"):
        build_site(checkout)


def test_a_page_over_two_megabytes_names_its_notebook(checkout: Path) -> None:
    _append(checkout, "20_measure", "word " * 400_000)
    with pytest.raises(InputError, match=r"measure.html: 2\.\d MB, over 2 MB"):
        build_site(checkout)


def test_a_site_over_twenty_megabytes_is_refused(checkout: Path) -> None:
    (checkout / "data" / "published" / "large.csv").write_bytes(b"1\n" * 9_800_000)
    with pytest.raises(InputError, match=r"report: 20\.\d MB in all, over 20 MB"):
        build_site(checkout)


def test_samples_are_compressed_and_the_same(built: Path) -> None:
    packed = built / "data" / "reports" / "data" / "campaigns" / "planted-laptop" / "samples.csv.gz"
    original = built / "data" / "campaigns" / "planted-laptop" / "samples.csv"
    assert gzip.decompress(packed.read_bytes()) == original.read_bytes()
    assert _soup(built, "campaigns").select_one("a[href='data/campaigns/planted-laptop/samples.csv.gz']")


def test_the_page_of_a_removed_notebook_goes(checkout: Path) -> None:
    (checkout / "data" / "reports" / "notebooks" / "90_summary.ipynb").unlink()
    build_site(checkout)
    assert not (checkout / "data" / "reports" / "summary.html").exists()


def test_a_notebook_without_title_is_named(tmp_path: Path) -> None:
    path = tmp_path / "20_measure.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text")])))
    with pytest.raises(InputError, match="has no title"):
        read_page(path)


def test_a_figure_takes_the_pages_colours_and_ids_of_its_own(built: Path) -> None:
    pages = (built / "data" / "reports").glob("*.html")
    drawings = [drawing for page in pages for drawing in re.findall(r"<svg viewBox.*?</svg>", page.read_text(), re.S)]
    assert len(drawings) >= 5
    for drawing in drawings:
        assert not [light for light, _ in style.THEME.values() if light in drawing]
    soup = _soup(built, "measure")
    ids = [tag["id"] for tag in soup.select("[id]")]
    assert len(ids) == len(set(ids))
    foreign = '<?xml version="1.0"?><svg width="72pt" height="36pt"><path id="a" fill="#123456"/></svg>'
    shown = markup.figure(foreign, "a & b", "figure-1")
    assert "on-paper" in shown
    assert 'viewBox="0 0 96.0 48.0"' in shown
    assert 'aria-label="a &amp; b"' in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (3, "3"),
        (12345, "12\u202f345"),
        (0.012345, "0.0123"),
        (12.345, "12.3"),
        (123456.0, "123\u202f456"),
        (1.5e-6, "1.50e-06"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers_are_written_for_people(value: float | None, shown: str) -> None:
    assert markup.number(value) == shown


def test_backticks_of_a_docstring_are_code_and_nothing_else_is_markup() -> None:
    assert markup.coded("`a < b` and <b>") == "<code>a &lt; b</code> and &lt;b&gt;"


def test_seconds_are_shown_in_ms_with_their_points_below_each_other() -> None:
    table = pd.DataFrame({"network": ["mlp", "lenet"], "step_s": [0.0021, 0.0416], "is_used": [True, False]})
    cells = [cell.get_text() for cell in BeautifulSoup(markup.table(table), "html.parser").select("td, th")]
    assert cells == ["network", "step, ms", "is used", "mlp", "2.10", "yes", "lenet", "41.60", "no"]


def test_pages_are_grouped_by_the_question_that_they_are_about(built: Path) -> None:
    soup = _soup(built, "predict")
    groups = {
        group.summary.get_text(): [link["href"] for link in group.select("a")]
        for group in soup.select("nav.side details")
    }
    assert list(groups) == ["Overview", "One device", "Many workers, predicted", "Evidence"]
    assert groups["Overview"] == ["index.html", "planner.html", "summary.html"]
    assert groups["One device"] == ["measure.html"]
    assert groups["Many workers, predicted"] == ["predict.html"]
    opened = [group.summary.get_text() for group in soup.select("nav.side details[open]")]
    assert opened == ["Overview", "Many workers, predicted"]
    assert not [group for group in _soup(built, "index").select("nav.side details") if not group.has_attr("open")]


def test_no_notebook_is_about_two_questions() -> None:
    numbers = [number for question in QUESTIONS for number in question.numbers]
    assert len(numbers) == len(set(numbers))


def test_how_to_cite_comes_from_the_citation_file(checkout: Path) -> None:
    soup = _soup(checkout, "about")
    own, paper = [block.get_text() for block in soup.select("pre")]
    assert "author = {{The planters}}" in own
    assert "title = {{planted study}}" in own
    assert paper.startswith("@article{planted2018,")
    assert "author = {Ada Planted}" in paper
    assert soup.select_one("a[href='https://doi.org/10.1/planted']")
    assert "Something new (planted)." in soup.get_text()
    path = checkout / "CITATION.cff"
    path.write_text(path.read_text().replace("title: planted study", "name: planted study"))
    with pytest.raises(InputError, match=r"CITATION.cff: title: is missing"):
        build_site(checkout)


def test_the_table_of_exit_statuses_has_every_one_that_the_command_uses(built: Path) -> None:
    shown = [int(term.get_text()) for term in _soup(built, "about").select("section:has(> #statuses) dt")]
    source = (Path(site.__file__).parents[1] / "cli.py").read_text()
    used = re.findall(r"(?:_say\([^\n]*, |sys\.exit\(|status = )(\d+)", source)
    assert {1, 2, 130} <= {int(status) for status in used} <= set(shown)


def test_the_reference_has_each_public_function_with_its_signature(tmp_path: Path) -> None:
    source = tmp_path / "steptime"
    (source / "model").mkdir(parents=True)
    (source / "model" / "planted.py").write_text(
        '"""What it knows."""\ndef shown(x_s: float, *, n: int = 2) -> float:\n'
        '    """What it does.\n\n    And why."""\n'
        'def _hidden():\n    """Not shown."""\ndef undocumented():\n    pass\n'
        'class Thing:\n    """A thing."""\n    x_s: float\n    def grow(self, by: int) -> int:\n        """Grows."""\n'
    )
    ((package, (module,)),) = reference.modules(source).items()
    assert (package, module.name, module.doc) == ("model", "steptime.model.planted", ("What it knows.",))
    assert [item.signature for item in module.entries] == [
        "shown(x_s: float, *, n: int=2) -> float",
        "Thing(x_s: float)",
    ]
    assert module.entries[0].doc == ("What it does.", "And why.")
    assert [item.signature for item in module.entries[1].methods] == ["grow(by: int) -> int"]


def test_the_reference_page_names_what_the_readers_notebooks_import(built: Path) -> None:
    text = _soup(built, "reference").main.get_text()
    assert "steptime.model.collectives" in text
    assert "Raises InputError" in text
    stages = yaml.safe_load((Path(__file__).parents[2] / "dvc.yaml").read_text())["stages"]
    assert {f"lib/steptime/{package}" for package in reference.PACKAGES} <= set(stages["site"]["deps"])


def test_claims_that_were_decided_come_first(checkout: Path) -> None:
    path = checkout / "data" / "derived" / "claims" / "planted.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps(rows[::-1]))
    build_site(checkout)
    verdicts = [row["data-verdict"] for row in _soup(checkout, "claims").select("#ledger tbody tr")]
    assert verdicts[-2:] == ["unverified source", "needs a GPU"]
    assert verdicts[:-2] == [row["verdict"] for row in rows[::-1] if row["verdict"] in verdicts[:-2]]


def test_a_long_reason_is_cut_where_a_part_ends_and_told_in_full_below(checkout: Path) -> None:
    path = checkout / "data" / "derived" / "claims" / "planted.json"
    rows = json.loads(path.read_text())
    rows[0]["why"] = "; ".join(f"part {place} is longer" for place in range(100))
    path.write_text(json.dumps(rows))
    build_site(checkout)
    cell = _soup(checkout, "claims").select_one("#ledger tbody tr [data-label=Why] > div")
    shown = cell.contents[0].strip()
    assert len(shown) < 250
    assert shown.endswith("is longer …")
    assert rows[0]["why"] in cell.details.get_text()


def test_a_figures_repeated_styles_are_written_once_and_nothing_it_refers_to_is_lost() -> None:
    style.use()
    svg = style.svg_text(figures.speed_up(_speed_ups(), title="planted"))
    shown = markup.figure(svg, "planted", "figure-1")
    assert len(shown) < 0.8 * len(svg)
    soup = BeautifulSoup(shown, "html.parser")
    ids = {tag["id"] for tag in soup.select("[id]")}
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', shown))
    assert used == ids
    classes = set(re.findall(r"svg \.([\w-]+)\{", shown))
    assert {name for tag in soup.select("svg [class]") for name in tag["class"]} == classes
    texts = [tag.get_text() for tag in soup.select("text")]
    assert texts == [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)<", svg)]


def test_pandas_two_rows_of_headings_become_one_and_a_plain_first_column_stays_in_sight() -> None:
    table = pd.DataFrame({"network": ["a", "b"], "size": [1, 2], "why": ["x", "long words " * 9]}).set_index("network")
    soup = BeautifulSoup(table.to_html(), "html.parser")
    markup.tidy_tables(soup)
    assert [[cell.get_text() for cell in row.select("th")] for row in soup.select("thead tr")] == [
        ["network", "size", "why"]
    ]
    assert soup.table["class"] == "held"
    assert [cell.get_text()[:4] for cell in soup.select(".long")] == ["long"]
    nested = table.set_index("size", append=True)
    again = BeautifulSoup(pd.concat([nested, nested]).sort_index().to_html(), "html.parser")
    markup.tidy_tables(again)
    assert len(again.select("thead tr")) == 1
    assert not again.select(".held")


def test_pandas_tables_lose_row_numbers_and_gain_alignment() -> None:
    plain = BeautifulSoup(pd.DataFrame({"name": ["a"], "size": [1.5]}).to_html(), "html.parser")
    markup.tidy_tables(plain)
    assert [cell.get_text() for cell in plain.select("th, td")] == ["name", "size", "a", "1.5"]
    assert [cell.get_text() for cell in plain.select(".number")] == ["size", "1.5"]
    assert plain.select_one("div.scroll[tabindex] > table")
    index = pd.MultiIndex.from_tuples([("t", "a"), ("t", "b")], names=["one", "two"])
    nested = BeautifulSoup(pd.DataFrame({"x": ["p", "q"], "n": [1, 2]}, index=index).to_html(), "html.parser")
    markup.tidy_tables(nested)
    assert [cell.get_text() for cell in nested.select("td.number")] == ["1", "2"]
    assert "n" in [cell.get_text() for cell in nested.select("thead .number")]
    assert "x" not in [cell.get_text() for cell in nested.select("thead .number")]


def _soup(root: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((root / "data" / "reports" / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def _hashes(root: Path) -> dict[str, str]:
    reports = root / "data" / "reports"
    files = sorted(path for path in reports.rglob("*") if path.is_file())
    return {path.relative_to(reports).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _append(root: Path, name: str, text: str) -> None:
    path = root / "data" / "reports" / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell(text, id="added"))
    path.write_text(nbformat.writes(notebook))
