"""Does it fit: the peak memory of a training step, predicted from the network's description.

What the description knows: parameters and their gradients, whatever the batch; for each sample its input, the layers'
outputs that backward needs, and the largest gradients that exist at one time. What it cannot know, the framework's own
memory and what it keeps beside, is measured: peak = base + factor x described, one base and one factor for each
setting, fitted to measured peaks.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from steptime.core.campaign import Campaign
from steptime.core.errors import InputError
from steptime.core.network import BYTES_PER_VALUE, Layer, Network
from steptime.model.cases import case_table
from steptime.networks import build

TOKEN_BYTES = 8
VIEWS = ("flatten",)
FEWEST_NETWORKS = 2
"""A line needs two."""


@dataclass(frozen=True)
class Described:
    """Bytes of a training step by the description: `fixed` of any batch, `per_sample` for each of its samples."""

    fixed: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.fixed + batch * self.per_sample


@dataclass(frozen=True)
class MemoryFit:
    """peak = base_bytes + factor x described bytes."""

    base_bytes: float
    factor: float

    def predict(self, described_bytes: float) -> float:
        return self.base_bytes + self.factor * described_bytes


def described_bytes(network: Network, dtype: str = "float32") -> Described:
    """Parameters and gradients (float32 whatever the dtype: mixed precision keeps them so), activations in `dtype`."""
    size = BYTES_PER_VALUE[dtype]
    values = math.prod(network.input_shape)
    kept = [layer.activation_count for layer in network.layers if layer.kind not in VIEWS]
    passing = max((_gradient_values(layer) for layer in network.layers), default=0)
    first = values * (TOKEN_BYTES if network.vocabulary else BYTES_PER_VALUE["float32"])
    fixed = 2 * network.parameter_count * BYTES_PER_VALUE["float32"]
    return Described(fixed, first + (sum(kept) + passing) * size)


def fit_memory(described: np.ndarray, measured: np.ndarray) -> MemoryFit:
    """Least relative squares of base + factor x described, both at least 0. Arrays of bytes, one entry a case.

    Raises InputError for fewer than two different described sizes.
    """
    described, measured = np.asarray(described, float), np.asarray(measured, float)
    if len(np.unique(described)) < FEWEST_NETWORKS:
        raise InputError(f"memory fit: {len(np.unique(described))} different sizes: needs 2; measure more networks")
    scale = described.max()
    solution, _ = nnls(np.column_stack([1 / measured, described / scale / measured]), np.ones(len(measured)))
    return MemoryFit(float(solution[0]), float(solution[1] / scale))


def memory_cases(cases: pd.DataFrame) -> pd.DataFrame:
    """The rows of a campaign's `model.cases.case_table` that the model is about, with described_bytes: a measured peak,
    input read in sequence, a type whose bytes are known."""
    known = cases["peak_memory_bytes"].notna() & (cases["input"] == "sequential") & cases["dtype"].isin(BYTES_PER_VALUE)
    found = cases[known].copy()
    pairs = set(zip(found["network"], found["size"], strict=True))
    networks = {pair: build(pair[0], size=pair[1]) for pair in pairs}
    found["described_bytes"] = [
        described_bytes(networks[name, size], dtype).at(int(batch))
        for name, size, dtype, batch in zip(
            found["network"], found["size"], found["dtype"], found["batch"], strict=True
        )
    ]
    return found


def fit_setting(campaign: Campaign, setting: str) -> tuple[MemoryFit, float | None, int]:
    """The fit of a setting on the processor in float32, fewest threads; its worst error with a network left out (None
    with fewer than three networks), and the largest batch measured. Raises InputError naming the settings measured.
    """
    cases = memory_cases(case_table(campaign))
    known = sorted(cases["setting"].unique())
    own = cases[cases["setting"] == setting]
    if own.empty:
        raise InputError(
            f"framework {setting!r}: campaign {campaign.name} has no memory of it; it has {', '.join(known)}"
        )
    own = own[own["device"] == ("cpu" if "cpu" in set(own["device"]) else own["device"].iloc[0])]
    own = own[own["threads"] == own["threads"].min()]
    fit = fit_memory(own["described_bytes"].to_numpy(), own["peak_memory_bytes"].to_numpy())
    errors = left_out(own)["error"].abs()
    return fit, float(errors.max()) if len(errors) else None, int(own["batch"].max())


def left_out(cases: pd.DataFrame) -> pd.DataFrame:
    """`cases` with each network's peak predicted from the other networks' alone; empty with fewer than three networks.

    Columns in: network, described_bytes, peak_memory_bytes (one setting). Adds predicted_bytes, error (relative), and
    constant_error, the error of predicting the mean of the others: what the description adds is the difference.
    """
    parts = []
    for network, part in cases.groupby("network"):
        others = cases[cases["network"] != network]
        if others["network"].nunique() < FEWEST_NETWORKS:
            return cases.iloc[:0].assign(predicted_bytes=[], error=[], constant_error=[])
        fit = fit_memory(others["described_bytes"].to_numpy(), others["peak_memory_bytes"].to_numpy())
        predicted = fit.predict(part["described_bytes"])
        parts.append(
            part.assign(
                predicted_bytes=predicted,
                error=predicted / part["peak_memory_bytes"] - 1,
                constant_error=others["peak_memory_bytes"].mean() / part["peak_memory_bytes"] - 1,
            )
        )
    return pd.concat(parts)


def largest_batch(fit: MemoryFit, described: Described, memory_bytes: float) -> int | None:
    """The largest batch whose predicted peak is at most `memory_bytes`; 0 where not one sample fits.

    None where the fit sees no growth with the batch, so that nothing can be said.
    """
    growth = fit.factor * described.per_sample
    if growth <= 0:
        return None
    return max(0, math.floor((memory_bytes - fit.predict(described.fixed)) / growth))


def _gradient_values(layer: Layer) -> int:
    """Values of the gradients of a layer's inputs and output, one sample."""
    return layer.activation_count + sum(math.prod(shape) for shape in layer.in_shapes)
