"""Which setting is fastest, by how much, tied with which, and what limits it: the answer to "which framework here?"."""

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from steptime.core.campaign import Campaign
from steptime.core.errors import InputError
from steptime.core.machine import Machine, read_machine
from steptime.core.statistics import rankings
from steptime.model.cases import CONDITIONS, case_table, main_conditions, phase_table
from steptime.model.roofline import limits
from steptime.networks import build

STANDING_COLUMNS = ["campaign", *CONDITIONS, "setting", "ratio", "lo", "hi", "standing"]
LIMIT_WORDS = {
    "input": "reading the input",
    "arithmetic": "arithmetic, at the machine's peak",
    "memory": "moving bytes, at the speed of a copy",
    "rest": "neither: kernels below the peaks, and time between kernels",
}


@dataclass(frozen=True)
class Choice:
    """The answer for one network under one set of conditions; seconds.

    `tied`: settings that cannot be told from the fastest. `next_name` takes `next_ratio` times as long (`next_lo` to
    `next_hi`). `limits`: shares of the step, see `roofline.limits`; empty where the machine's peaks for these
    conditions are not known.
    """

    campaign: str
    conditions: dict[str, object]
    fastest: str
    median_s: float
    lo_s: float
    hi_s: float
    tied: tuple[str, ...] = ()
    next_name: str | None = None
    next_ratio: float = float("nan")
    next_lo: float = float("nan")
    next_hi: float = float("nan")
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """What takes the largest share of the step, in words; empty where it is not known."""
        return LIMIT_WORDS[max(self.limits, key=lambda name: self.limits[name])] if self.limits else ""


def standings(campaign: Campaign) -> pd.DataFrame:
    """Every setting against the fastest of its conditions; columns STANDING_COLUMNS.

    `ratio`: its step over the fastest one's, paired by round, with the interval that the correction for the number of
    comparisons leaves (`core.statistics.ranking`). `standing`: fastest, tied, slower, or alone (nothing to compare).
    """
    table = rankings(campaign.joined())
    if table.empty:
        return pd.DataFrame(columns=STANDING_COLUMNS)
    is_fastest = (table["lo"] == 1) & (table["hi"] == 1)
    settings = table.groupby(CONDITIONS)["setting"].transform("size")
    standing = table["tied"].map({True: "tied", False: "slower"}).mask(is_fastest, "fastest")
    standing = standing.mask(is_fastest & (settings == 1), "alone")
    return table.assign(campaign=campaign.name, standing=standing)[STANDING_COLUMNS]


def choices(cases: pd.DataFrame, standing: pd.DataFrame, phases: pd.DataFrame, machine: Machine | None) -> list[Choice]:
    """An answer for each of the conditions in `cases`, all of one campaign, in their order.

    `cases`: from `case_table`; `standing`: from `standings`; `phases`: from `phase_table`.
    """
    found = []
    for conditions, part in cases.groupby(CONDITIONS, sort=False):
        given = dict(zip(CONDITIONS, conditions, strict=True))
        same = standing[(standing[CONDITIONS] == pd.Series(given)).all(axis=1)]
        first = same[same["standing"].isin(["fastest", "alone"])]
        if first.empty:
            continue
        name = first["setting"].iloc[0]
        own = part[part["setting"] == name]
        if own.empty:
            continue
        best = own.iloc[0]
        slower = same[same["standing"] == "slower"].sort_values("ratio")
        following = {f"next_{key}": slower.iloc[0][key] for key in ("ratio", "lo", "hi")} if len(slower) else {}
        found.append(
            Choice(
                campaign=str(best["campaign"]),
                conditions=given,
                fastest=name,
                **{key: float(best[key]) for key in ("median_s", "lo_s", "hi_s")},
                tied=tuple(same.loc[same["standing"] == "tied", "setting"]),
                next_name=slower["setting"].iloc[0] if len(slower) else None,
                **following,
                limits=limits_of(best, phases, machine),
            )
        )
    return found


def limits_of(case: pd.Series, phases: pd.DataFrame, machine: Machine | None) -> dict[str, float]:
    """What limits the step of a row of `case_table`; empty unless the peaks are of its device, threads and type.

    The peaks are those of float32 on the processor with `machine.cores` threads.
    """
    fits = machine is not None and case["device"] == "cpu" and case["dtype"] == "float32"
    if machine is None or not fits or case["threads"] != machine.cores:
        return {}
    own = phases[(phases["case_id"] == case["case_id"]) & (phases["phase"] == "io")]["time_s"]
    io_s = float(own.iloc[0]) if len(own) and case["input"] in ("sequential", "jpeg-0") else 0.0
    network = build(case["network"], size=case["size"])
    return dict(limits(network, int(case["batch"]), case["dtype"], machine, float(case["median_s"]), io_s))


def machine_of(folder: Path, local_machine: Path | None = None) -> Machine | None:
    """The peaks stored with the campaign in `folder`, for this machine's own those in `local_machine`, else None."""
    for path in (Path(folder) / "machine.json", local_machine):
        if path is not None and path.is_file():
            return read_machine(path)
    return None


def choose(
    campaign: Campaign, network: str, machine: Machine | None = None, batch: int | None = None
) -> tuple[Choice, pd.Series]:
    """The answer for `network` in a campaign, and the case with the most samples a second under any conditions.

    `batch`: None takes the one that the most settings ran. Raises InputError naming what the campaign has.
    """
    build(network)  # an unknown name is refused by what knows the names
    part = Campaign(campaign.name, campaign.runs[campaign.runs["network"] == network], campaign.samples)
    cases = case_table(part) if len(part.runs) else pd.DataFrame()
    if cases.empty:
        known = ", ".join(sorted(campaign.runs.loc[campaign.runs["status"] == "finished", "network"].unique()))
        raise InputError(f"choose: {network}: campaign {campaign.name} has no two processes of it; it has {known}")
    asked = cases if batch is None else cases[cases["batch"] == batch]
    if asked.empty:
        known = ", ".join(map(str, sorted(cases["batch"].unique())))
        raise InputError(f"choose: --batch = {batch}: {campaign.name} has {network} with batch {known}")
    (choice,) = choices(main_conditions(asked), standings(part), phase_table(part), machine)
    return choice, cases.loc[cases["samples_per_s"].idxmax()]


def conditions_words(conditions: dict[str, object] | pd.Series) -> str:
    """Conditions for people: "alexnet (quick), batch 16, cpu, 1 thread, sequential input"."""
    threads = int(str(conditions["threads"]))
    return (
        f"{conditions['network']} ({conditions['size']}), batch {conditions['batch']}, {conditions['device']}, "
        f"{threads} thread{'s' if threads > 1 else ''}, {conditions['input']} input"
    )


def answer_lines(choice: Choice) -> list[str]:
    """The answer in a few lines: fastest, ties, next, limit."""
    samples_per_s = int(str(choice.conditions["batch"])) / choice.median_s
    lines = [
        f"fastest: {choice.fastest}, {1e3 * choice.median_s:.3g} ms a step ({1e3 * choice.lo_s:.3g} to "
        f"{1e3 * choice.hi_s:.3g}, 95 %), {samples_per_s:.4g} samples/s"
    ]
    if choice.tied:
        lines.append(f"tied with it, no difference that this campaign can tell: {', '.join(choice.tied)}")
    if choice.next_name:
        lines.append(
            f"next: {choice.next_name} takes {choice.next_ratio:.3g} times as long "
            f"({choice.next_lo:.3g} to {choice.next_hi:.3g}, corrected for the number of comparisons)"
        )
    elif not choice.tied:
        lines.append("no other setting was measured under these conditions")
    if choice.limits:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in choice.limits.items())
        lines.append(f"limit: {choice.limit} (least time that the machine's peaks allow, of the step: {shares})")
    return lines
