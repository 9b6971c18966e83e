"""Claims: a published figure, ours beside it, and what follows. Published figures: data/published/*.yaml."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from steptime.core.errors import InputError
from steptime.core.files import read_json, read_yaml, validated, write_json

Verdict = Literal[
    "holds",
    "holds in shape",
    "fitted",
    "inconclusive",
    "does not hold here",
    "unverified source",
    "needs a GPU",
]
Kind = Literal["measured", "emulated", "modelled", "simulated"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Figure(_Record):
    """One published figure. `where`: its table or figure number, or "from the abstract"."""

    id: str
    text: str
    value: float | None = None
    unit: str
    where: str
    conditions: str
    verified: bool


class Paper(_Record):
    """One paper or data source with the figures taken from it."""

    id: str
    citation: str
    link: str
    figures: tuple[Figure, ...]

    def figure(self, name: str) -> Figure:
        """The figure with that id. Raises InputError naming the known ones for another."""
        found = next((figure for figure in self.figures if figure.id == name), None)
        if found is None:
            known = ", ".join(figure.id for figure in self.figures)
            raise InputError(f"{self.id}.yaml: figure {name!r}: is not there; known are {known}")
        return found

    @property
    def values(self) -> dict[str, float]:
        """{figure's id: its value}, of those that have one."""
        return {figure.id: float(figure.value) for figure in self.figures if figure.value is not None}


class Claim(_Record):
    """One row of the ledger. `ours_lo` and `ours_hi` bound the 95 % interval where there is one.

    `tolerance` says in words and numbers what decides; `how` where our figure came from; `data` the file it is in.
    """

    id: str
    paper: str
    figure: str
    claim: str
    published: float | None
    unit: str
    ours: float | None
    ours_lo: float | None = None
    ours_hi: float | None = None
    kind: Kind
    tolerance: str
    verdict: Verdict
    why: str
    how: str
    data: str


def read_paper(path: Path) -> Paper:
    """The paper in data/published/ID.yaml; its id must be the file's name."""
    paper = validated(Paper, read_yaml(path), path)
    if paper.id != Path(path).stem:
        raise InputError(f"{path}: id = {paper.id!r}: must equal the file's name; rename one of them")
    return paper


def decide(figure: Figure, holds: bool, *, in_shape: bool = False) -> Verdict:
    """The verdict that a comparison allows: a figure that nobody could check decides nothing."""
    if not figure.verified:
        return "unverified source"
    if holds:
        return "holds"
    return "holds in shape" if in_shape else "does not hold here"


def write_claims(path: Path, claims: list[Claim]) -> None:
    """Write a study's claims as JSON, in the order given."""
    write_json(path, [claim.model_dump() for claim in claims])


def read_claims(path: Path) -> list[Claim]:
    """The claims of one study. Raises InputError naming the row."""
    return [validated(Claim, row, f"{path}: row {number}") for number, row in enumerate(read_json(path), start=1)]
