"""Cells of measured campaigns of many workers: a row each, and what is predicted of them from fewer workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import pandas as pd
from scipy import optimize, stats

from steptime import networks
from steptime.core import statistics
from steptime.core.errors import InputError
from steptime.core.machine import burst_bytes
from steptime.core.step import LayerProfile
from steptime.core.workers import WorkersCampaign, ends_of
from steptime.model.worker_steps import (
    FITTED,
    PREDICTED,
    SERVED,
    Cell,
    Host,
    Observed,
    Replayed,
    ShapedLink,
    fit_host,
    predict,
    relative_errors,
    with_rest,
)

LEVEL = 0.9
GLOO = "torch_gloo"
"""The engine that runs every schedule: torch.distributed over gloo."""
OF_RUN = ("engine", "schedule", "compute", "profile", "ranks", "ends", "rate_bits_per_s")
MEASURED = (
    *("alpha_s", "beta_s_per_byte", "unshaped_beta_s_per_byte", "sent_bytes", "expected_bytes"),
    *("forward_s", "backward_s", "exposed_s", "update_s"),
)
COLUMNS = [
    *("campaign", "case_id", *OF_RUN, "network", "size", "batch", "workers", "is_cpu_bound"),
    *("median_s", "lo_s", "hi_s", "processes", "cpu_s", *MEASURED, "speed_up", "speed_up_lo", "speed_up_hi"),
]
PREDICTIONS = [
    *("campaign", "case_id", "network", "engine", "schedule", "workers", "rate_bits_per_s", "is_cpu_bound"),
    "is_fitted",
    *("measured_s", "predicted_s", "lo_s", "hi_s", "error", "is_covered"),
]


def cell_table(found: WorkersCampaign) -> pd.DataFrame:
    """One row a case, columns COLUMNS: the median step with its 95 % interval over runs, and where it went.

    `cpu_s`: of all workers together, a step. A link's constants and the phases are medians over runs; one run on a link
    that its machine could not feed makes the case `is_cpu_bound`. Speed-up: N t(1) / t(N), the work of each worker
    staying, over a lone worker of the same engine; missing where none was measured. Its interval is that of t(N).
    """
    joined = found.campaign.joined()
    table = statistics.case_table(joined).set_index("case_id")[["median_s", "lo_s", "hi_s", "processes"]]
    runs = found.campaign.runs.merge(found.workers, on="run_id")
    steps = statistics.usable(joined)
    cpu_s = steps.groupby(["case_id", "run_id"])["cpu_s"].median().groupby("case_id").median()
    by_case = runs.groupby("case_id")
    first = by_case[[*OF_RUN, "network", "size", "batch", "workers"]].first()
    table = table.join(first, how="inner").join(by_case[list(MEASURED)].median()).join(cpu_s)
    table["is_cpu_bound"] = by_case["is_cpu_bound"].any()
    table = table.reset_index().assign(campaign=found.campaign.name)
    lone_s = table["engine"].map(table[table["workers"] == 1].set_index("engine")["median_s"])
    for name, of in (("speed_up", "median_s"), ("speed_up_lo", "hi_s"), ("speed_up_hi", "lo_s")):
        table[name] = table["workers"] * lone_s / table[of]
    order = ["network", "rate_bits_per_s", "schedule", "workers"]
    return table.sort_values(order, kind="stable", ignore_index=True)[COLUMNS]


def name_of(schedule: str) -> str:
    """A schedule without its value."""
    return schedule.partition("=")[0]


def cell_of(row: pd.Series, profile: LayerProfile) -> Cell:
    """The cell of a row of `cell_table`, to be predicted."""
    name = name_of(row["schedule"])
    link = None
    if pd.notna(row["rate_bits_per_s"]):
        burst = burst_bytes(float(row["rate_bits_per_s"]))
        link = ShapedLink(float(row["alpha_s"]), float(row["beta_s_per_byte"]), burst)
    ends = ends_of(row["ends"]) if isinstance(row["ends"], str) else ()
    factors = _factor_bytes(row, profile) if name == "sufficient_factors" else ()
    return Cell(name, int(row["workers"]), ends, link, factors)


def replayed_of(found: WorkersCampaign, cells: pd.DataFrame) -> Replayed:
    """What the campaign's workers wait through, with what the lone worker's step has beyond the profile; `cells` are
    those of one engine.

    Raises InputError where workers computed, or none was alone.
    """
    alone = cells[cells["workers"] == 1]
    if found.profile is None or alone.empty:
        raise InputError(f"campaign {found.campaign.name}: needs a profile and the step of a lone worker; measure them")
    return with_rest(Replayed(found.profile), float(alone["median_s"].iloc[0]))


def _factor_bytes(row: pd.Series, profile: LayerProfile) -> tuple[float, ...]:
    """By learnable layer in sending order: the bytes of a worker's factors, infinite where a layer is not dense."""
    dense = {
        layer.name: sum(layer.parameters[0].shape[:2])
        for layer in networks.build(row["network"], size=row["size"]).layers
        if layer.kind == "dense"
    }
    learnable = [name for name, size in zip(profile.layers, profile.parameter_bytes, strict=True) if size > 0]
    return tuple(4.0 * row["batch"] * dense[name] if name in dense else np.inf for name in reversed(learnable))


# ------------------------------------------------------------------------------------------------------- predicting


@dataclass(frozen=True)
class Fitted:
    """A host, and the typical relative error of a schedule's steps at `most` workers when fitted without it."""

    host: Host
    error: float
    cells: int
    most: int

    def half_width(self, workers: int) -> float:
        """Half the 90 % interval, relative: every doubling beyond `most` adds the error once more, as variance."""
        spread = self.error * np.sqrt(1 + max(0.0, log2(workers / self.most)))
        return float(stats.t.ppf((1 + LEVEL) / 2, max(1, self.cells - len(FITTED))) * spread)


def fit_cells(observed: Sequence[Observed], cells: pd.DataFrame, cores: int) -> Fitted:
    """Fit the host to `observed`, a row of `cells` each, none on more workers than are to be fitted on.

    The error is that of leaving out each schedule in turn, where there is more than one.
    """
    message_cpu_s = message_cost(cells)
    host = fit_host(observed, cores, message_cpu_s)
    many = [each for each in observed if each.cell.workers > 1]
    names = sorted({each.cell.schedule for each in many})
    errors = relative_errors(many, host)
    if len(names) > 1:
        errors = np.concatenate(
            [
                relative_errors(
                    [each for each in many if each.cell.schedule == name],
                    fit_host([each for each in many if each.cell.schedule != name], cores, message_cpu_s),
                )
                for name in names
            ]
        )
    return Fitted(host, float(np.sqrt(np.mean(errors**2))), len(many), max(each.cell.workers for each in many))


def message_cost(cells: pd.DataFrame) -> float:
    """Processor seconds at one end of a message, by what workers used that push to servers and pull from them.

    There many messages are on their way at once and keep the cores busy; in a collective the ranks of a round sleep and
    wake each other, and waking an idle core is much of what they use, which is gone when more ranks than cores keep
    these busy. Non-negative least squares over the cells of more than one worker: what a worker used beyond a lone one
    of the same campaign, by its rounds, its messages to and from servers, and its bytes. 0 where nothing tells.
    """
    alone = cells[cells["workers"] == 1].set_index("campaign")["cpu_s"]
    many = cells[(cells["workers"] > 1) & cells["campaign"].isin(alone.index) & cells["ends"].notna()]
    many = many[many["schedule"].map(name_of).isin(PREDICTED)]
    if many.empty:
        return 0.0
    counts = many["ends"].map(lambda text: len(ends_of(text)))
    is_served = many["schedule"].map(name_of).isin(SERVED)
    servers = np.where(many["schedule"].map(name_of) == "ps_sharded", many["workers"], 1)
    columns = [
        np.where(is_served, 0.0, 2.0 * (many["workers"] - 1) * counts),
        np.where(is_served, 2.0 * servers * counts, 0.0),
        many["expected_bytes"],
    ]
    used = many["cpu_s"] / many["workers"] - many["campaign"].map(alone)
    matrix = np.stack(columns, axis=1).astype(float)
    scale = np.where(matrix.max(axis=0) > 0, matrix.max(axis=0), 1.0)
    found, _ = optimize.nnls(matrix / scale, used.to_numpy(float).clip(min=0))
    return float(found[1] / scale[1])


def predictions(campaigns: Sequence[WorkersCampaign], most: int = 2) -> tuple[pd.DataFrame, dict[str, Fitted]]:
    """Every cell predicted from those of at most `most` workers, columns PREDICTIONS; and the fit of each engine.

    Campaigns of one machine and engine share a fit; what is bound by the processors is predicted, but not fitted on.
    Cells of a schedule without a model, and of campaigns without a profile, are left out. Intervals are at 90 %.
    """
    shared: dict[str, list[tuple[pd.Series, Observed]]] = {}
    tables: dict[str, list[pd.DataFrame]] = {}
    cores: dict[str, int] = {}
    for found in campaigns:
        cells = cell_table(found)
        known = cells[cells["schedule"].map(name_of).isin(PREDICTED)]
        known = known[(known["workers"] == 1) | known["rate_bits_per_s"].notna()]
        runs = found.campaign.runs
        for engine, part in known.groupby("engine"):
            if found.profile is None or not (part["workers"] == 1).any():
                continue
            replayed = replayed_of(found, part)
            key = fit_key(engine, runs)
            cores[key] = int(runs["cores_allowed"].iloc[0])
            tables.setdefault(key, []).append(part)
            shared.setdefault(key, []).extend(
                (row, Observed(replayed, cell_of(row, replayed.profile), float(row["median_s"])))
                for _, row in part.iterrows()
            )
    rows, fits = [], {}
    for key, pairs in shared.items():
        few = [each for row, each in pairs if _is_given(row, most)]
        if not any(each.cell.workers > 1 for each in few):
            continue
        table = pd.concat(tables[key])
        fits[key] = fit_cells(few, table[table.apply(_is_given, axis=1, most=most)], cores[key])
        rows += [_predicted(row, each, fits[key], most) for row, each in pairs if row["workers"] > 1]
    return pd.DataFrame(rows, columns=PREDICTIONS), fits


def fit_key(engine: str, runs: pd.DataFrame) -> str:
    """Which of the fits of `predictions` is that of a campaign's machine and an engine; `runs`: its runs.csv."""
    return f"{engine} on {runs['cpu_model'].iloc[0]}, {runs['cores_allowed'].iloc[0]} cores"


def _is_given(row: pd.Series, most: int) -> bool:
    """Is the cell one that is fitted on?"""
    return bool(row["workers"] <= most and not row["is_cpu_bound"])


def _predicted(row: pd.Series, each: Observed, fitted: Fitted, most: int) -> dict[str, object]:
    predicted_s = predict(each.replayed, each.cell, fitted.host).step_s
    half = fitted.half_width(each.cell.workers)
    lo_s, hi_s = predicted_s * np.exp(-half), predicted_s * np.exp(half)
    return {
        **{name: row[name] for name in PREDICTIONS[:8]},
        **{"is_fitted": _is_given(row, most), "measured_s": each.step_s, "predicted_s": predicted_s},
        **{"lo_s": lo_s, "hi_s": hi_s, "error": predicted_s / each.step_s - 1},
        "is_covered": lo_s <= each.step_s <= hi_s,
    }
