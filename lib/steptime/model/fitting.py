"""From measurements to the model's inputs: layer profiles of campaigns and published tables, alpha-beta lines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from steptime.core.campaign import Campaign
from steptime.core.errors import InputError
from steptime.core.network import BYTES_PER_VALUE, Network
from steptime.core.statistics import usable
from steptime.core.step import LayerProfile
from steptime.model.collectives import AllReduce

PHASES = ("io", "h2d", "forward", "backward", "update")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class PassFit:
    """How far the layers' own times explain a pass (forward or backward): seconds of the whole pass, measured in one
    piece, and of its layers' sum."""

    whole_s: float
    layers_s: float

    @property
    def scale(self) -> float:
        """Factor that makes the layers add up to the whole pass."""
        return self.whole_s / self.layers_s

    @property
    def unexplained(self) -> float:
        """Share of the pass that its layers' sum misses; negative where timing layer by layer adds time."""
        return 1.0 - self.layers_s / self.whole_s


def layer_profile(campaign: Campaign, network: Network, case_id: str) -> LayerProfile:
    """The layer profile of a measured case: layer times scaled so that they add up to the measured t_f and t_b.

    A layer timed on its own pays for being timed (synchronisation, no fusion with its neighbours), so only the layers'
    shares are taken from the layer timings; `pass_fits` reports the factors. Layers that were not timed (fused into a
    neighbour, views) take no time. Raises InputError for a case without layer timings or with a layer that `network`
    does not have.
    """
    samples = _case(campaign, case_id)
    forward_s, backward_s = (_layer_medians(samples, network, name) for name in PASSES)
    fits = _pass_fits(samples, (forward_s, backward_s), campaign, case_id)
    first = samples.iloc[0]
    value_bytes = BYTES_PER_VALUE[first["dtype"]]
    times = phase_medians(campaign, case_id)
    return LayerProfile(
        network=network.name,
        source=f"{campaign.name}: {case_id}",
        batch=int(first["batch"]),
        layers=tuple(layer.name for layer in network.layers),
        forward_s=forward_s * fits["forward"].scale,
        backward_s=backward_s * fits["backward"].scale,
        parameter_bytes=np.array([layer.parameter_count * value_bytes for layer in network.layers], dtype=float),
        activation_bytes=np.array(
            [layer.activation_count * int(first["batch"]) * value_bytes for layer in network.layers], dtype=float
        ),
        t_io_s=times["io"],
        t_h2d_s=times["h2d"],
        t_u_s=times["update"],
    )


def pass_fits(campaign: Campaign, network: Network, case_id: str) -> dict[str, PassFit]:
    """What `layer_profile` scaled away, for "forward" and "backward"."""
    samples = _case(campaign, case_id)
    layers_s = tuple(_layer_medians(samples, network, name) for name in PASSES)
    return _pass_fits(samples, layers_s, campaign, case_id)


def phase_medians(campaign: Campaign, case_id: str) -> dict[str, float]:
    """Seconds of each phase of one step (mean over processes of their medians); 0 for a phase that has no samples."""
    samples = _case(campaign, case_id)
    return {phase: _central(usable(samples, phase)) for phase in PHASES}


def profile_cases(campaign: Campaign) -> pd.DataFrame:
    """The finished cases that a profile can be made of: both passes timed whole and by layer, reading not hidden.

    One row a case: case_id, framework, network, size, batch, dtype, device, threads, workers, input.
    """
    samples = campaign.samples[campaign.samples["phase"].isin(PASSES)]
    kinds = pd.DataFrame({"run_id": samples["run_id"], "kind": samples["phase"] + samples["layer"].isna().astype(str)})
    complete = kinds.groupby("run_id")["kind"].nunique()
    timed = set(complete.index[complete == 2 * len(PASSES)])
    runs = campaign.runs
    runs = runs[(runs["status"] == "finished") & (runs["input"] == "sequential") & runs["run_id"].isin(timed)]
    columns = ["case_id", "framework", "network", "size", "batch", "dtype", "device", "threads", "workers", "input"]
    return runs[columns].drop_duplicates("case_id").sort_values("case_id", ignore_index=True)


def find_case(campaign: Campaign, network: str, framework: str) -> str:
    """The case_id of the campaign's profile of `network` in `framework`; several: float32, then the first by name.

    Raises InputError naming what the campaign has.
    """
    cases = profile_cases(campaign)
    found = cases[(cases["network"] == network) & (cases["framework"] == framework)]
    if found.empty:
        pairs = sorted(set(zip(cases["framework"], cases["network"], strict=True)))
        known = ", ".join(f"{name} {net}" for name, net in pairs) or "no layer timings at all"
        raise InputError(f"campaign {campaign.name}: {framework} {network}: has no layer timings; it has {known}")
    return str(found.assign(other=found["dtype"] != "float32").sort_values(["other", "case_id"])["case_id"].iloc[0])


def profile_from_table(
    table: pd.DataFrame,
    *,
    network: str,
    source: str,
    batch: int,
    step_s: float | None = None,
    phases_s: dict[str, float] | None = None,
) -> LayerProfile:
    """A layer profile from a table with one row a layer in forward order.

    Columns: layer, backward_s, parameter_bytes; optionally forward_s, activation_bytes. Without forward_s, `step_s`
    (the measured step of one worker) is needed: what it has beyond backward is called forward and shared out as
    backward is, since no step model depends on how forward is spread. `phases_s`: t_io, t_h2d and t_u under the keys
    io, h2d, update. Raises InputError naming a missing column, or a step shorter than its backward pass.
    """
    needed = ["layer", "backward_s", "parameter_bytes"] + ([] if step_s is not None else ["forward_s"])
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise InputError(f"{source}: column {missing[0]!r} is missing; a layer profile has {', '.join(needed)}")
    backward_s = table["backward_s"].to_numpy(float)
    if step_s is None:
        forward_s = table["forward_s"].to_numpy(float)
    elif step_s < backward_s.sum():
        raise InputError(f"{source}: step_s = {step_s:g}: is shorter than backward, {backward_s.sum():g}; check both")
    else:
        forward_s = backward_s * (step_s / backward_s.sum() - 1)
    phases_s = phases_s or {}
    zeros = np.zeros(len(table))
    return LayerProfile(
        network=network,
        source=source,
        batch=batch,
        layers=tuple(table["layer"].astype(str)),
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=table["parameter_bytes"].to_numpy(float),
        activation_bytes=table["activation_bytes"].to_numpy(float) if "activation_bytes" in table else zeros,
        t_io_s=phases_s.get("io", 0.0),
        t_h2d_s=phases_s.get("h2d", 0.0),
        t_u_s=phases_s.get("update", 0.0),
    )


def fit_all_reduce(n_bytes: Sequence[float] | np.ndarray, time_s: Sequence[float] | np.ndarray) -> AllReduce:
    """The line a + b n through measured all-reduces with the smallest sum of squared *relative* errors, a, b >= 0.

    Relative, because times span decades and an absolute fit sees only the longest. Raises InputError for fewer than
    two sizes or a time that is not positive.
    """
    sizes, times = np.asarray(n_bytes, dtype=float), np.asarray(time_s, dtype=float)
    if len(np.unique(sizes)) < 2 or not (times > 0).all():
        raise InputError("all-reduce fit: needs two sizes or more, each with a positive time; add or mend the rows")
    scale = max(sizes.max(), 1.0)
    solution, _ = nnls(np.column_stack([1 / times, sizes / scale / times]), np.ones(len(times)))
    return AllReduce(float(solution[0]), float(solution[1] / scale))


def _case(campaign: Campaign, case_id: str) -> pd.DataFrame:
    """The case's samples, each with its run's case_id, batch and dtype."""
    runs = campaign.runs[(campaign.runs["case_id"] == case_id) & (campaign.runs["status"] == "finished")]
    if runs.empty:
        known = ", ".join(sorted(set(campaign.runs["case_id"])))
        raise InputError(f"campaign {campaign.name}: case {case_id!r}: has no finished run; cases are {known}")
    samples = campaign.samples[campaign.samples["run_id"].isin(runs["run_id"])]
    # a run has fifty columns: only those that the fits ask for
    return samples.merge(runs[["run_id", "case_id", "batch", "dtype"]], on="run_id", validate="many_to_one")


def _central(samples: pd.DataFrame) -> float:
    """Mean over processes of their medians, seconds; 0 without samples."""
    return float(samples.groupby("run_id")["time_s"].median().mean()) if len(samples) else 0.0


def _layer_medians(samples: pd.DataFrame, network: Network, phase: str) -> np.ndarray:
    """Seconds of each of the network's layers in one pass, 0 where it was not timed."""
    timed = samples[
        (samples["phase"] == phase) & samples["layer"].notna() & ~samples["is_warmup"] & ~samples["is_disturbed"]
    ]
    by_process = timed.groupby(["layer", "run_id"])["time_s"].median()
    medians = by_process.groupby("layer").mean()
    names = [layer.name for layer in network.layers]
    strange = sorted(set(medians.index) - set(names))
    if strange:
        raise InputError(
            f"case {samples['case_id'].iloc[0]}: layer {strange[0]!r} is not in {network.name}; "
            "measure again, the network has changed since"
        )
    return medians.reindex(names).fillna(0.0).to_numpy(float)


def _pass_fits(
    samples: pd.DataFrame, layers_s: Sequence[np.ndarray], campaign: Campaign, case_id: str
) -> dict[str, PassFit]:
    fits = {}
    for name, times in zip(PASSES, layers_s, strict=True):
        whole = _central(usable(samples, name))
        if times.sum() <= 0 or whole <= 0:
            raise InputError(
                f"campaign {campaign.name}: case {case_id}: {name} has no layer or no phase timings; "
                "measure with layer_samples and phase_samples above 0"
            )
        fits[name] = PassFit(whole, float(times.sum()))
    return fits
