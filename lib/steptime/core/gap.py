"""What a step takes beyond the sum of its layers, and which named events that is."""

import pandas as pd

from steptime.core.campaign import Campaign
from steptime.core.statistics import usable

PARTS = {"io": "input", "h2d": "copy", "loss": "loss", "update": "update", "dispatch": "dispatch", "other": "other"}
"""Phase or part of a profiled step -> its name here. `other`: operations that belong to no layer."""
GAP_COLUMNS = ["case_id", "profile", "step_s", "layers_s", "gap_s", *(f"{name}_s" for name in PARTS.values())]
GAP_COLUMNS += ["unexplained_s", "attributed_share"]


def gaps(campaign: Campaign) -> pd.DataFrame:
    """One row a case with a layer profile: its step, the sum of its layers, and what lies between, by name.

    `gap_s` = `step_s` - `layers_s`; the named parts and `unexplained_s` add up to it; `attributed_share` = 1 -
    |unexplained| / |gap|. `step_s` is of steps that no instrument touched. `profile` says where the rest comes from:

    * "in the step": layers, loss, update, copy and dispatch are stretches of one instrumented step, of which no moment
      belongs to two. Of the repetitions the half whose wholes lie in the middle is averaged, so that the parts still
      add up. The step is a plain one: that whole less the median difference to the plain step made just before each, so
      that what drifts is in neither, plus the input's reading. Unexplained is that difference, negative where the
      instruments add time: what they add and what they miss cannot be told apart, so neither is hidden in a part.
      `dispatch_s` is the time in which none of the others runs: the calling of layers, and what a graph's executor
      spends between operations.
    * "one by one": the step is the mean over processes of their median undisturbed step; layers were run alone, and
      copy and update are phases of other steps; loss and dispatch were not measured and stay in `unexplained_s`, with
      what a layer alone costs more or less than inside the step.

    Settings that fuse layers have no layers and no row.
    """
    samples = campaign.joined()
    timed = samples[~samples["is_warmup"] & samples["layer"].notna()]
    rows = []
    for case_id, part in timed.groupby("case_id", sort=True):
        own = samples[(samples["case_id"] == case_id) & samples["run_id"].isin(part["run_id"])]
        steps = usable(own)
        if steps.empty:
            continue
        in_step = (part["phase"] == "profiled").any()
        parts = _profiled(part) if in_step else _one_by_one(part, own)
        parts["io"] = _central(own[(own["phase"] == "io") & own["repeat"].isin(steps["repeat"])])
        step_s = parts["plain"] + parts["io"] if in_step else _central(steps)
        layers_s = parts["layers"]
        named = {f"{name}_s": parts.get(key, 0.0) for key, name in PARTS.items()}
        gap_s = step_s - layers_s
        unexplained_s = gap_s - sum(named.values())
        rows.append(
            {"case_id": case_id, "profile": "in the step" if in_step else "one by one", "step_s": step_s}
            | {"layers_s": layers_s, "gap_s": gap_s, **named, "unexplained_s": unexplained_s}
            | {"attributed_share": 1 - abs(unexplained_s) / abs(gap_s) if gap_s else float("nan")}
        )
    return pd.DataFrame(rows, columns=GAP_COLUMNS)


def gap_table(campaign: Campaign) -> pd.DataFrame:
    """The gaps of `gaps` as rows: `case_id`, `part`, `time_s`, `share` of the gap; `unexplained` is a case's last."""
    names = [*PARTS.values(), "unexplained"]
    table = gaps(campaign)
    rows = [
        {"case_id": row["case_id"], "part": name, "time_s": row[f"{name}_s"], "share": row[f"{name}_s"] / row["gap_s"]}
        for row in table.to_dict("records")
        for name in names
    ]
    return pd.DataFrame(rows, columns=["case_id", "part", "time_s", "share"])


def _profiled(timed: pd.DataFrame) -> dict[str, float]:
    """{part: seconds}, among them `layers` (their sum) and `plain`, from the repetitions of profiled steps."""
    names = timed["layer"].where(timed["phase"] == "profiled", "layers").rename("part")
    table = timed.groupby([timed["run_id"], timed["repeat"], names])["time_s"].sum().unstack(fill_value=0)
    parts = table.drop(columns="plain")
    whole = parts.sum(axis=1)
    middle = parts[whole.between(whole.quantile(0.25), whole.quantile(0.75))].mean()
    return {**middle.to_dict(), "plain": float(middle.sum() - (whole - table["plain"]).median())}


def _one_by_one(timed: pd.DataFrame, own: pd.DataFrame) -> dict[str, float]:
    layers_s = float(timed.groupby(["phase", "layer"])["time_s"].median().sum())
    return {"layers": layers_s, **{phase: _central(usable(own, phase)) for phase in ("h2d", "update")}}


def _central(samples: pd.DataFrame) -> float:
    """Mean over processes of their medians; 0 without samples."""
    return float(samples.groupby("run_id")["time_s"].median().mean()) if len(samples) else 0.0
