"""README's generated blocks: the headline figure and table of the committed campaigns, and the system packages."""

import hashlib
import re
from pathlib import Path

import pandas as pd

from steptime.core.errors import InputError
from steptime.core.files import read_text, write_text
from steptime.core.workers import is_of_workers
from steptime.report import markup, provenance
from steptime.report.summary import figure_path, read_summary

FIGURE = Path("data") / "headline.svg"
_NOTHING_COMMITTED = (
    "No campaign is committed yet, so there are no numbers to show here. `make study` measures your machine and puts "
    "its numbers into `data/reports/index.html`; `steptime campaign add NAME` makes them part of the study."
)


def update_readme(root: Path) -> None:
    """Write README.md's generated blocks and the headline figure; files that are up to date are left alone.

    Raises InputError when a marker is missing or the summary was made from other campaigns than those committed.
    """
    path = root / "README.md"
    old = read_text(path)
    new = _replaced(old, "headline", headline(root), path)
    new = _replaced(new, "system packages", system_packages(root), path)
    if new != old:
        write_text(path, new)


def inputs_hash(root: Path) -> str:
    """Twelve hex digits over every committed campaign's and published file's name and bytes."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("data/campaigns/*/*.csv"), *root.glob("data/published/*.*")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def headline(root: Path) -> str:
    """The headline block in Markdown; also brings data/headline.svg up to date."""
    # the headline is of single devices
    committed = [item for item in provenance.recorded(root) if not item.is_local and not is_of_workers(item.folder)]
    if not committed:
        (root / FIGURE).unlink(missing_ok=True)
        return _NOTHING_COMMITTED
    summary = read_summary(root)
    names = [item.name for item in committed]
    if sorted(summary.campaigns) != names or summary.headline is None:
        made_from = ", ".join(summary.campaigns) or "no campaign"
        raise InputError(
            f"summary.json: made from {made_from}, but data/campaigns holds {', '.join(names)}; run `dvc repro summary`"
        )
    svg = read_text(figure_path(root, summary.headline.figure))
    if not (root / FIGURE).is_file() or read_text(root / FIGURE) != svg:
        write_text(root / FIGURE, svg)
    lines = [f"<!-- inputs {inputs_hash(root)} -->", ""]
    lines += [f"{place}. {answer.text}" for place, answer in enumerate(summary.answers, start=1)]
    caption = summary.headline.caption or summary.question
    lines += ["", f"![{caption}]({FIGURE.as_posix()})", "", *_markdown_table(summary.headline.frame()), "", caption]
    for item in committed:
        facts = dict(item.facts())
        machine = ", ".join(facts[name] for name in ("Processor", "Frameworks", "Measured") if name in facts)
        lines.append(f"Campaign `{item.name}`: {machine}, {facts['Cores allowed']} cores.")
    return "\n".join(lines)


def system_packages(root: Path) -> str:
    """The list in lib/locks/system-packages.txt as a Markdown table: package, purpose, who needs it."""
    path = root / "lib" / "locks" / "system-packages.txt"
    rows = [re.split(r"\s{2,}", line.strip()) for line in read_text(path).splitlines() if line and line[0] != "#"]
    wrong = next((row for row in rows if len(row) != 4), None)
    if wrong:
        raise InputError(f"{path}: {wrong[0]}: needs package, binary, purpose, needed by; two spaces apart")
    lines = ["| Debian package | for | needed by |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {purpose} | `make {user}` |" for name, _, purpose, user in rows])


def _markdown_table(rows: pd.DataFrame) -> list[str]:
    columns = [markup.column(str(name), rows[name]) for name in rows.columns]
    rule = ["--:" if pd.api.types.is_numeric_dtype(rows[name]) else "---" for name in rows.columns]
    lines = zip(*(cells for _, cells in columns), strict=True)
    cells = [[label for label, _ in columns], rule, *lines]
    return ["| " + " | ".join(line) + " |" for line in cells]


def _replaced(text: str, name: str, block: str, path: Path) -> str:
    begin, end = f"<!-- {name}: written by `steptime site` -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise InputError(f"{path}: needs one line {begin!r} and one line {end!r}; put them back")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"
