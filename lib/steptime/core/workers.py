"""What a campaign of many workers has beside runs.csv and samples.csv: workers.csv, timelines.csv and profile.csv.

`workers.csv` has a row a finished run: by which engine and schedule, over which link, what each node sent, and where a
step's time went. `timelines.csv` is the last step of each case's first run. `profile.csv` is what was replayed. A
folder with a workers.csv is such a campaign; no study of single devices reads it.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from steptime.core.campaign import Campaign, read_campaign, read_table, recorded_folders
from steptime.core.errors import InputError
from steptime.core.files import read_text
from steptime.core.step import LayerProfile

COMPUTED = "real compute, real communication"
EMULATED = "emulated compute, real communication"

_TEXT = pa.Column(str)
_POSITIVE = pa.Column(int, pa.Check.ge(1))
_SECONDS = pa.Column(float, pa.Check.ge(0))
_MAYBE = pa.Column(float, pa.Check.ge(0), nullable=True)

WORKERS = pa.DataFrameSchema(
    {
        "run_id": pa.Column(str, unique=True),
        "engine": _TEXT,
        "schedule": _TEXT,
        "compute": pa.Column(str, pa.Check.isin([COMPUTED, EMULATED])),
        "profile": pa.Column(str, nullable=True),
        "ranks": _POSITIVE,  # workers and parameter servers
        "nodes": _POSITIVE,  # namespaces, or 1 over loopback
        "ends": pa.Column(str, nullable=True),  # how many layers have been sent after each message, e.g. 1 3 4
        # the link; without a rate it is the loopback interface, which nothing holds back
        "rate_bits_per_s": _MAYBE,
        "alpha_s": _MAYBE,
        "beta_s_per_byte": _MAYBE,
        "unshaped_beta_s_per_byte": _MAYBE,
        # all workers at the rate would take more than a third of what this machine can move
        "is_cpu_bound": pa.Column(bool),
        # of the worker's node that sent most, a step: counted at its interface with headers; by the closed form without
        "sent_bytes": _MAYBE,
        "expected_bytes": _SECONDS,
        # medians over the timed steps of means over workers; exposed: from the last gradient to the last average; empty
        # where an engine runs a step whole
        "forward_s": _MAYBE,
        "backward_s": _MAYBE,
        "exposed_s": _MAYBE,
        "update_s": _MAYBE,
    },
    strict=True,
    ordered=True,
)

TIMELINES = pa.DataFrameSchema(
    {
        "run_id": _TEXT,
        "worker": pa.Column(int, pa.Check.ge(0)),
        "task": pa.Column(str, pa.Check.isin(["forward", "backward", "exchange", "update"])),
        "resource": pa.Column(str, pa.Check.isin(["device", "link"])),
        "layer": pa.Column(str, nullable=True),  # of an exchange: its layers, joined by +
        "start_s": _SECONDS,
        "end_s": _SECONDS,
    },
    strict=True,
    ordered=True,
)

PROFILE = pa.DataFrameSchema(
    {
        "layer": pa.Column(str, unique=True),
        "forward_s": pa.Column(float, [pa.Check.ge(0), pa.Check.le(600)]),
        "backward_s": pa.Column(float, [pa.Check.ge(0), pa.Check.le(600)]),
        "parameter_bytes": pa.Column(int, [pa.Check.ge(0), pa.Check.le(1 << 36)]),
    },
    strict=True,
    ordered=True,
)


FILES = ("workers.csv", "timelines.csv", "profile.csv")
"""Beside the tables of any campaign; the last one where compute is emulated."""


@dataclass(frozen=True)
class WorkersCampaign:
    """A campaign of many workers; `profile` is what its workers replayed, None where they computed."""

    campaign: Campaign
    workers: pd.DataFrame
    timelines: pd.DataFrame
    profile: LayerProfile | None

    def steps(self) -> pd.DataFrame:
        """The timed steps, each with the columns of its run in runs.csv and workers.csv."""
        joined = self.campaign.joined()
        return joined[~joined["is_warmup"]].merge(self.workers, on="run_id", validate="many_to_one")


def workers_folders(root: Path) -> dict[str, Path]:
    """The recorded campaigns of many workers by name, those in data/campaigns."""
    return {name: folder for name, folder in recorded_folders(root).items() if is_of_workers(folder)}


def is_of_workers(folder: Path) -> bool:
    return (Path(folder) / "workers.csv").is_file()


def read_workers(folder: Path) -> WorkersCampaign:
    """The campaign of many workers in `folder`, validated. Raises InputError naming file, line, column, value."""
    folder = Path(folder)
    campaign = read_campaign(folder)
    workers = read_table(folder / "workers.csv", WORKERS)
    timelines = read_table(folder / "timelines.csv", TIMELINES)
    _check_runs(campaign.runs, workers, folder)
    _check_timelines(campaign.runs, timelines, folder / "timelines.csv")
    profile = None
    if (workers["compute"] == EMULATED).any():
        first = workers[workers["compute"] == EMULATED].merge(campaign.runs, on="run_id").iloc[0]
        profile = read_profile(folder / "profile.csv", first["network"], int(first["batch"]))
        _check_ends(workers, int((profile.parameter_bytes > 0).sum()), folder / "workers.csv")
    return WorkersCampaign(campaign, workers, timelines, profile)


def files_of_workers(folder: Path) -> dict[str, str]:
    """The campaign's FILES that are there, as texts."""
    return {name: read_text(Path(folder) / name) for name in FILES if (Path(folder) / name).is_file()}


def _check_runs(runs: pd.DataFrame, workers: pd.DataFrame, folder: Path) -> None:
    """Raise InputError unless each finished run has its row of workers.csv, and each row its run and its link."""
    path = folder / "workers.csv"
    finished = runs[runs["status"] == "finished"]
    unknown = workers.index[~workers["run_id"].isin(set(finished["run_id"]))]
    if len(unknown):
        raise InputError(
            f"{path}: line {unknown[0] + 2}: run_id = {workers['run_id'][unknown[0]]!r}: is no finished run of "
            "runs.csv; add its run or remove the row"
        )
    missing = finished.index[~finished["run_id"].isin(set(workers["run_id"]))]
    if len(missing):
        raise InputError(
            f"{folder / 'runs.csv'}: line {missing[0] + 2}: run_id = {runs['run_id'][missing[0]]!r}: is finished but "
            "not in workers.csv; add its row or correct the status"
        )
    ranks = workers.merge(runs[["run_id", "workers"]], on="run_id")
    few = ranks.index[ranks["ranks"] < ranks["workers"]]
    if len(few):
        row = ranks.loc[few[0]]
        raise InputError(
            f"{path}: line {few[0] + 2}: ranks = {row['ranks']}: must be at least the {row['workers']} workers of "
            "runs.csv; correct one of them"
        )
    for name in ("alpha_s", "beta_s_per_byte"):
        silent = workers.index[workers["rate_bits_per_s"].notna() & workers[name].isna()]
        if len(silent):
            raise InputError(
                f"{path}: line {silent[0] + 2}: {name} = empty: a link with a rate has what was measured of it; add it"
            )


def _check_timelines(runs: pd.DataFrame, timelines: pd.DataFrame, path: Path) -> None:
    """Raise InputError for a task of no run, of a worker that the run does not have, or that ends before it begins."""
    counts = timelines["run_id"].map(runs.set_index("run_id")["workers"])
    faults = {
        "run_id": (counts.isna(), "is not in runs.csv; add its run or remove the row"),
        "worker": (timelines["worker"] >= counts, "the run has no such worker; correct it or remove the row"),
        "end_s": (timelines["end_s"] < timelines["start_s"], "must not be below start_s; correct or remove the row"),
    }
    for name, (wrong, mend) in faults.items():
        if wrong.any():
            row = timelines.index[wrong][0]
            value = timelines[name][row]
            shown = repr(value) if isinstance(value, str) else str(value)
            raise InputError(f"{path}: line {row + 2}: {name} = {shown}: {mend}")


def _check_ends(workers: pd.DataFrame, layers: int, path: Path) -> None:
    """Raise InputError unless `ends` rise to the number of learnable layers, where messages have them."""
    for row, text in workers["ends"].dropna().items():
        ends = ends_of(text)
        if not ends or list(ends) != sorted(set(ends)) or ends[0] < 1 or ends[-1] != layers:
            raise InputError(
                f"{path}: line {row + 2}: ends = {text!r}: must be rising whole numbers up to {layers}, the number "
                "of layers with parameters in profile.csv; correct it"
            )


def ends_of(text: str) -> tuple[int, ...]:
    """A cell of the column `ends` as numbers; none where it holds anything else."""
    parts = text.split()
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def read_profile(path: Path, network: str, batch: int) -> LayerProfile:
    """The layer profile in a CSV file with PROFILE's columns, a row a layer in forward order; no other phases.

    Raises InputError naming file, line, column and value, also for a profile without parameters.
    """
    table = read_table(Path(path), PROFILE)
    if not table["parameter_bytes"].sum():
        raise InputError(f"{path}: parameter_bytes: no layer has any; without gradients there is nothing to send")
    return LayerProfile(
        network=network,
        source=Path(path).name,
        batch=batch,
        layers=tuple(table["layer"]),
        forward_s=table["forward_s"].to_numpy(float),
        backward_s=table["backward_s"].to_numpy(float),
        parameter_bytes=table["parameter_bytes"].to_numpy(float),
        activation_bytes=table["parameter_bytes"].to_numpy(float) * 0,
    )


def profile_table(profile: LayerProfile) -> pd.DataFrame:
    """The profile as `read_profile` reads it."""
    columns = {"forward_s": profile.forward_s, "backward_s": profile.backward_s}
    sizes = profile.parameter_bytes.astype(int)
    return pd.DataFrame({"layer": list(profile.layers), **columns, "parameter_bytes": sizes})


def csv_text(table: pd.DataFrame) -> str:
    """As the campaign's other tables are written."""
    return str(table.to_csv(index=False, float_format="%.9g", lineterminator="\n"))
