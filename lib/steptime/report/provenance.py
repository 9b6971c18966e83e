"""Where the numbers come from: the campaigns and machines of a checkout, as the report shows them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steptime.core.campaign import Campaign, read_campaign, recorded_folders
from steptime.core.statistics import CASE, counted

MEASURING = ("machine", "measure")
"""Stages that measure here: their pages are about this machine."""


@dataclass(frozen=True)
class Recorded:
    """A campaign of this checkout. Local: measured here, in an ignored folder; else committed."""

    campaign: Campaign
    folder: Path
    is_local: bool

    @property
    def name(self) -> str:
        return self.campaign.name

    def facts(self) -> list[tuple[str, str]]:
        """What must be known to believe the numbers: (label, value), machine first."""
        runs = self.campaign.runs
        started = sorted(runs["started_utc"].dropna())
        days = sorted({stamp[:10] for stamp in started})
        revision = [f"{rev[:10]}{' with local changes' if dirty else ''}" for rev, dirty in _revisions(runs)]
        memory = [f"{value / 2**30:.1f} GiB" for value in sorted(set(runs["memory_bytes"]))]
        cores = [f"{allowed} of {present}" for allowed, present in _pairs(runs, "cores_allowed", "cores_present")]
        facts = [
            ("Processor", _listed(runs["cpu_model"])),
            ("Cores allowed", ", ".join(cores)),
            ("Memory", ", ".join(memory)),
            ("Virtual machine", "yes" if runs["is_virtual"].any() else "no"),
            ("System", _listed(runs["platform"])),
            ("GPU", _listed(runs["gpu_model"]) or "none"),
            ("GPU driver", _listed(runs["gpu_driver"])),
            ("Frameworks", ", ".join(f"{name} {version}" for name, version in self.versions())),
            ("Python", _listed(runs["python_version"])),
            ("BLAS", _listed(runs["blas"])),
            ("Timer", _listed(runs["timer"])),
            ("Measured", " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""),
            ("Git revision", ", ".join(revision)),
            ("Command", _listed(runs["command"])),
        ]
        return [(label, value) for label, value in facts if value]

    def versions(self) -> list[tuple[str, str]]:
        """(framework, version), each pair once."""
        return _pairs(self.campaign.runs.dropna(subset="framework_version"), "framework", "framework_version")

    def cases(self) -> pd.DataFrame:
        """One row a case that ran: its columns, processes, timed steps, share disturbed, which count, why it ended."""
        runs = self.campaign.runs
        finished = runs[runs["status"] == "finished"]
        samples = self.campaign.samples
        steps = samples[(samples["phase"] == "step") & ~samples["is_warmup"] & samples["layer"].isna()]
        joined = steps.merge(finished[["run_id", "case_id"]], on="run_id")
        by_case = joined.groupby("case_id")["is_disturbed"].agg(["size", "mean"])
        all_count = counted(joined).groupby(joined["case_id"]).all()
        rows = []
        for case_id, part in finished.groupby("case_id", sort=True):
            steps_of = by_case.loc[case_id] if case_id in by_case.index else {"size": 0, "mean": float("nan")}
            rows.append(
                {"case": case_id}
                | {name: part[name].iloc[0] for name in CASE}
                | {
                    "processes": len(part),
                    "timed steps": int(steps_of["size"]),
                    "disturbed": steps_of["mean"],
                    "counted": _counted(steps_of["mean"], all_count.get(case_id, True)),
                    "stopped because": _listed(part["stop_reason"]),
                }
            )
        table = pd.DataFrame(
            rows, columns=["case", *CASE, "processes", "timed steps", "disturbed", "counted", "stopped because"]
        )
        # of many workers a case is a schedule and a link besides
        told = [] if table.duplicated(list(CASE)).any() else ["case"]
        return table.drop(columns=[*told, *(name for name, _ in self.common())])

    def common(self) -> list[tuple[str, str]]:
        """What all cases share: (column, value)."""
        runs = self.campaign.runs
        columns = [name for name in CASE[2:] if runs[name].nunique() == 1]
        return [(name, str(runs[name].iloc[0])) for name in columns]

    def not_run(self) -> pd.DataFrame:
        """One row a case that did not run or failed, with the reason."""
        runs = self.campaign.runs
        missing = runs[runs["status"] != "finished"]
        # What the adapter said, without the command and the type of its exception.
        missing = missing.assign(reason=missing["reason"].str.split("Error: ", n=1).str[-1])
        table = missing[[*CASE, "status", "reason"]].drop_duplicates().sort_values(list(CASE), kind="stable")
        return table.drop(columns=[name for name, _ in self.common()]).replace(
            {"status": {"not_run": "not run", "out_of_memory": "out of memory"}}
        )


def recorded(root: Path) -> list[Recorded]:
    """The committed campaigns by name, then the local one. Raises InputError when a file is not valid."""
    found = [
        Recorded(read_campaign(folder), folder, name == "local") for name, folder in recorded_folders(root).items()
    ]
    return sorted(found, key=lambda item: (item.is_local, item.name))


def campaigns_of(stage: str, root: Path, known: list[Recorded]) -> list[Recorded]:
    """The campaigns that a stage's page shows: this machine's for the stages that measure, else those whose rows are in
    its derived tables; all of them where no table names one."""
    names: set[Any] = {"local"} if stage in MEASURING else set()
    for path in sorted((root / "data" / "derived" / stage).glob("*.csv")):
        if "campaign" in pd.read_csv(path, nrows=0).columns:
            names |= set(pd.read_csv(path, usecols=["campaign"])["campaign"])
    used = [item for item in known if item.name in names]
    return used or known


def _counted(share_disturbed: float, all_count: bool) -> str:
    """Which steps an estimate rests on."""
    if share_disturbed and all_count:
        return "all steps"
    return "calm steps, under half" if share_disturbed > 0.5 else "calm steps"


def _pairs(table: pd.DataFrame, first: str, second: str) -> list[tuple[Any, Any]]:
    return sorted(set(zip(table[first], table[second], strict=True)))


def _revisions(runs: pd.DataFrame) -> list[tuple[str, bool]]:
    return _pairs(runs.dropna(subset="git_revision"), "git_revision", "git_dirty")


def _listed(values: pd.Series) -> str:
    """Distinct values, sorted, in one string."""
    return ", ".join(sorted({str(value) for value in values.dropna()}))
