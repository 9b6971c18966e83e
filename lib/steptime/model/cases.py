"""What a campaign says of each of its cases, one row a case: step time, tail, phases, memory, use of the processor."""

import pandas as pd

from steptime.core import statistics
from steptime.core.campaign import Campaign
from steptime.core.parity import busy_cores
from steptime.core.statistics import percentiles, setting_names, usable

CASE = list(statistics.CASE)
CONDITIONS = list(statistics.CONDITIONS)
PERCENTILES = {50: "p50_s", 95: "p95_s", 99: "p99_s"}
ESTIMATE = ["median_s", "lo_s", "hi_s", "processes", "samples", "disturbed_share"]
CASE_COLUMNS = [
    *("campaign", "case_id", *CASE, "setting", *ESTIMATE, *PERCENTILES.values()),
    *("samples_per_s", "first_step_s", "all_steps_mean_s", "cpu_share", "peak_memory_bytes", "energy_j"),
]
PHASE_COLUMNS = ["campaign", "case_id", *CASE, "setting", "phase", "time_s"]
NOT_RUN_COLUMNS = ["campaign", "case_id", *CASE, "setting", "status", "reason"]
KIND_GROUPS = {
    "convolution": ("conv",),
    "dense": ("dense", "token_dense"),
    "recurrent, attention": ("lstm", "attention"),
    "normalisation": ("batch_norm", "lrn", "layer_norm"),
    "pooling": ("max_pool", "avg_pool", "global_avg_pool", "last", "mean_steps"),
    "element-wise": ("relu", "sigmoid", "gelu", "dropout", "add", "position"),
    "moving": ("concat", "flatten", "embedding"),
}
"""Layer kinds as the figures group them."""


def group_of(kind: str) -> str:
    """The group of a layer kind. An unknown kind is a KeyError: it has to be given a group."""
    return {kind: name for name, kinds in KIND_GROUPS.items() for kind in kinds}[kind]


def family(framework: str) -> str:
    """The framework of a setting: tensorflow of tensorflow_xla and of tensorflow1."""
    return framework.split("_")[0].removesuffix("1")


def case_table(campaign: Campaign) -> pd.DataFrame:
    """One row a case with at least two finished processes; columns CASE_COLUMNS, seconds, bytes and joules.

    `p50_s`, `p95_s` and `p99_s` are of the single step, all processes together. `all_steps_mean_s` is what a script
    reports that divides the time of a run by its steps: the mean over all steps, the first one and its compilation
    included; `first_step_s` is that first step. `cpu_share`: `core.parity.busy_cores`, 1 is one busy core.
    `energy_j`: joules a step, missing where nothing could read them.
    """
    joined = campaign.joined()
    table = statistics.case_table(joined).query("processes > 1").set_index("case_id")
    every = joined[(joined["phase"] == "step") & joined["layer"].isna()].sort_values(["run_id", "repeat"])
    by_case = usable(joined).groupby("case_id")
    tails = {str(case_id): percentiles(part, list(PERCENTILES)).set_index("percent") for case_id, part in by_case}
    for percent, name in PERCENTILES.items():
        table[name] = pd.Series({case_id: tail.loc[percent, "time_s"] for case_id, tail in tails.items()}, dtype=float)
    by_run = every.groupby(["case_id", "run_id"])["time_s"]
    table["samples_per_s"] = table["batch"].astype(float) / table["median_s"].astype(float)
    table["first_step_s"] = by_run.first().groupby("case_id").mean()
    table["all_steps_mean_s"] = by_run.mean().groupby("case_id").mean()
    table["cpu_share"] = busy_cores(campaign)
    memory = every.groupby(["case_id", "run_id"])["peak_memory_bytes"].first().astype(float)
    table["peak_memory_bytes"] = memory.groupby("case_id").median()
    # a run's energy is that of all its timed steps
    per_run = every[~every["is_warmup"]].groupby(["case_id", "run_id"])["energy_j"].agg(["first", "size"])
    table["energy_j"] = (per_run["first"].astype(float) / per_run["size"]).groupby("case_id").median()
    table["setting"] = setting_names(table)
    return table.assign(campaign=campaign.name).reset_index()[CASE_COLUMNS]


def phase_table(campaign: Campaign) -> pd.DataFrame:
    """One row a case and phase that was timed, also for settings whose layers were not; columns PHASE_COLUMNS.

    Seconds: the mean over processes of their medians, without warm-ups and disturbed repetitions.
    """
    samples = campaign.samples
    whole = samples[
        (samples["phase"] != "step") & samples["layer"].isna() & ~samples["is_warmup"] & ~samples["is_disturbed"]
    ]
    medians = whole.groupby(["run_id", "phase"], as_index=False)["time_s"].median()
    runs = campaign.runs.loc[campaign.runs["status"] == "finished", ["run_id", "case_id", *CASE]]
    table = medians.merge(runs, on="run_id").groupby(["case_id", *CASE, "phase"], as_index=False)["time_s"].mean()
    return table.assign(campaign=campaign.name, setting=setting_names(table))[PHASE_COLUMNS]


def not_run_table(campaign: Campaign) -> pd.DataFrame:
    """One row a case of which no run finished, with the reason; columns NOT_RUN_COLUMNS."""
    runs = campaign.runs
    done = set(runs.loc[runs["status"] == "finished", "case_id"])
    missing = runs[~runs["case_id"].isin(done)].drop_duplicates("case_id").sort_values("case_id", ignore_index=True)
    return missing.assign(campaign=campaign.name, setting=setting_names(missing))[NOT_RUN_COLUMNS]


def main_conditions(cases: pd.DataFrame) -> pd.DataFrame:
    """The rows of `cases` that a comparison of settings is about, one batch a network.

    Of each campaign: the fewest workers, input in sequence, a GPU before a CPU, the quick size before the full one, the
    fewest threads; for each network the batch that the most settings ran, then the largest.
    """
    kept = []
    for _, part in cases.groupby("campaign", sort=False):
        part = part[part["workers"] == part["workers"].min()]
        for name, wish in (("input", "sequential"), ("device", "cuda"), ("size", "quick")):
            part = part[part[name] == (wish if wish in set(part[name]) else min(part[name]))]
        part = part[part["threads"] == part["threads"].min()]
        for _, of_network in part.groupby("network", sort=False):
            counts = of_network.groupby("batch")["setting"].nunique()
            batch = counts[counts == counts.max()].index.max()
            kept.append(of_network[of_network["batch"] == batch])
    return pd.concat(kept) if kept else cases.iloc[:0]
