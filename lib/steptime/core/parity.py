"""Parity of a campaign's settings: `parity.csv` beside its tables, one row a setting, dtype and network."""

from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from steptime.core.campaign import Campaign, as_table, read_table
from steptime.core.statistics import usable

VERDICTS = ("agrees", "differs", "not expressible", "not installed", "failed")
MOST_BUSY = 1.25
"""Busy cores for each core given, above which a case did not keep to its threads."""
_TEXT, _MAYBE_TEXT = pa.Column(str), pa.Column(str, nullable=True)
_MAYBE, _MAYBE_BOOL = pa.Column(float, nullable=True), pa.Column("boolean", nullable=True)
PARITY = pa.DataFrameSchema(
    {
        "framework": _TEXT,
        "framework_version": _MAYBE_TEXT,
        "network": _TEXT,
        "variant": _MAYBE_TEXT,
        "dtype": _TEXT,
        "parameters": pa.Column("Int64", pa.Check.ge(0), nullable=True),
        "parameters_agree": _MAYBE_BOOL,
        "shapes_agree": _MAYBE_BOOL,
        "flops_agree": _MAYBE_BOOL,
        "seed": pa.Column("Int64", pa.Check.ge(0), nullable=True),
        "worst_output": _MAYBE,
        "worst_gradient": _MAYBE,
        "worst_tensor": _MAYBE_TEXT,
        "whole_gradient": _MAYBE,
        "output_tolerance": _MAYBE,
        "gradient_tolerance": _MAYBE,
        "gradient_rule": pa.Column(str, pa.Check.isin(["each tensor", "all as one"]), nullable=True),
        "loss_first": _MAYBE,
        "loss_last": _MAYBE,
        "loss_falls": _MAYBE_BOOL,
        "verdict": pa.Column(str, pa.Check.isin(VERDICTS)),
        "reason": _MAYBE_TEXT,
    },
    strict=True,
    ordered=True,
)


def read_parity(folder: Path) -> pd.DataFrame:
    """The parity recorded with the campaign in `folder`, without rows where it was not. InputError for a bad file."""
    path = Path(folder) / "parity.csv"
    return read_table(path, PARITY) if path.is_file() else as_table([], PARITY)


def busy_cores(campaign: Campaign) -> pd.Series:
    """Processor seconds a second of step, the median over each case's steps that count, by case_id."""
    steps = usable(campaign.joined()).dropna(subset="cpu_s")
    return (steps["cpu_s"] / steps["time_s"]).groupby(steps["case_id"]).median()


def overfull(campaign: Campaign) -> set[str]:
    """case_ids that kept more cores busy than they were given: their framework did not keep to its threads."""
    cases = campaign.runs.drop_duplicates("case_id").set_index("case_id")
    given = cases["threads"] + (cases["input"] == "prefetch")
    busy = busy_cores(campaign)
    return set(busy.index[busy > MOST_BUSY * given.reindex(busy.index)])


def comparable(campaign: Campaign, folder: Path) -> Campaign:
    """The campaign without the cases that must not be compared: their setting computes another thing or failed to, or
    it took more cores than it was given.
    """
    parity = read_parity(folder)
    failed = parity.loc[parity["verdict"].isin(["differs", "failed"]), ["framework", "network", "dtype"]]
    pairs = set(failed.itertuples(index=False, name=None))
    runs = campaign.runs
    kept = [pair not in pairs for pair in zip(runs["framework"], runs["network"], runs["dtype"], strict=True)]
    runs = runs[kept]
    runs = runs[~runs["case_id"].isin(overfull(campaign))]
    return Campaign(campaign.name, runs, campaign.samples[campaign.samples["run_id"].isin(runs["run_id"])])
