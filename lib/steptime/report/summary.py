"""What the summary stage hands to the report: summary.json and local.json in data/derived/summary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict

from steptime.core.errors import InputError
from steptime.core.files import read_json, validated

Cell = str | float | int | None


@dataclass(frozen=True)
class Question:
    """One of the study's questions. `title`: in the navigation; `numbers`: of the notebooks that are about it."""

    key: str
    title: str
    text: str
    numbers: frozenset[int]


QUESTIONS = (
    Question(
        "device",
        "One device",
        "Which framework is fastest on one device, and why?",
        frozenset([*range(10, 40), *range(50, 70)]),
    ),
    Question(
        "predicted",
        "Many workers, predicted",
        "What would another schedule, link or number of workers bring?",
        frozenset(range(40, 50)),
    ),
    Question(
        "measured",
        "Many workers, measured",
        "Do the predictions hold where many workers were measured?",
        frozenset(range(70, 90)),
    ),
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(_Record):
    """One sentence that answers a question (a key of QUESTIONS), and the figure that shows it (a file in
    data/figures/summary). A question's first answer is what most people read."""

    question: Literal["device", "predicted", "measured"]
    text: str
    figure: str | None = None


class Headline(_Record):
    """The study's first figure and table: `columns` in order (`_s` at the end means seconds), `table` one row each."""

    figure: str
    caption: str = ""
    columns: tuple[str, ...]
    table: tuple[dict[str, Cell], ...]

    def frame(self) -> pd.DataFrame:
        """The table as a dataframe."""
        return pd.DataFrame([{name: row.get(name) for name in self.columns} for row in self.table])


class Local(Headline):
    """What the machine at hand measured: for its owner only, so neither the claims nor README.md use it."""

    answers: tuple[str, ...]


class Summary(_Record):
    """`campaigns`: the committed campaigns that the answers and the headline are made from; none: nothing committed."""

    question: str
    answers: tuple[Answer, ...]
    headline: Headline | None
    campaigns: tuple[str, ...]

    @property
    def figures(self) -> list[str]:
        """Every figure's file name, once, the headline's first."""
        first = [self.headline.figure] if self.headline else []
        return list(dict.fromkeys(first + [answer.figure for answer in self.answers if answer.figure]))


def read_summary(root: Path) -> Summary:
    """The summary and the presence of its figures. Raises InputError naming the stage to run."""
    path = root / "data" / "derived" / "summary" / "summary.json"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run summary` (or `dvc repro summary`) first")
    summary = validated(Summary, read_json(path), path)
    for name in summary.figures:
        _check_figure(root, path, name)
    return summary


def read_local(root: Path) -> Local | None:
    """This machine's part; None where nothing was measured here. Raises InputError when its figure is missing."""
    path = root / "data" / "derived" / "summary" / "local.json"
    if not path.is_file():
        return None
    local = validated(Local, read_json(path), path)
    _check_figure(root, path, local.figure)
    return local


def figure_path(root: Path, name: str) -> Path:
    """Where the summary's figure `name` lies."""
    return root / "data" / "figures" / "summary" / name


def _check_figure(root: Path, path: Path, name: str) -> None:
    if not figure_path(root, name).is_file():
        raise InputError(f"{path}: figure = {name!r}: is not in data/figures/summary; run `steptime run summary`")
