"""Iteration times of Megatron on A100 GPUs: fitted to measured configurations, predicted for others, with intervals.

The physics is `model.parallelism.predict` with rates whose priors are an A100's and a node's published figures. What
it misses depends on the shapes of a layer's work, so the time of a layer and that of the logits have a factor each
that varies with hidden size, tensor size, micro batch, heads and sequence: a Gaussian process in log time. Near shapes
share it; far from every observed shape it is 1 +- its standard deviation and the physics alone predicts. Rates are the
maximum of the posterior; intervals (90 %) have the posterior of the rates, the process, the noise, and a growth for
each doubling of the GPUs beyond those observed.

A GPU has 80 GB: a configuration that would not fit (`model.training_memory`) is taken to recompute its layers in
full. Columns: CONFIGURATION, and TIME_MS where it was observed.

While this was built, all 1,440 single-node measurements of vTrain were looked at (the terms, the priors' centres,
LAYER_SD, HEAD_SD, REACH), and the published times of 8 to 512 GPUs of arXiv 2205.05198 (table 5), after which the
priors of flops_per_s and tensor_bytes_per_s were raised and stages send as that system does: errors on either are not
those of a blind prediction.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import least_squares, minimize_scalar

from steptime.core.errors import InputError
from steptime.model.observations import read_fields, refuse
from steptime.model.parallelism import Plan, Rates, Transformer, predict
from steptime.model.training_memory import peak_memory

CONFIGURATION = {
    "# GPUs": "gpus",
    "global batch": "samples",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}
"""Columns of a table and what they are called here."""
TIME_MS = "iteration time (ms)"
LOW_MS, HIGH_MS = "iteration time low (ms)", "iteration time high (ms)"
NOTE = "note"
MOST = 10**7
"""Largest accepted value of a column."""
GPU_BYTES = 80e9

PRIOR: dict[str, tuple[float, float]] = {
    "flops_per_s": (260e12, 0.06),
    "narrow": (150.0, 0.7),
    "attention_flops_per_s": (120e12, 0.4),
    "memory_bytes_per_s": (1.4e12, 0.05),
    "layer_passes": (5.0, 0.4),
    "softmax_passes": (5.0, 0.4),
    "vocabulary_bytes": (60.0, 0.5),
    "launch_s": (3e-3, 0.6),
    "split_launch_s": (2e-4, 1.0),
    "unfused_launch_s": (1e-3, 1.0),
    "head_launch_s": (2e-3, 1.0),
    "tensor_bytes_per_s": (220e9, 0.15),
    "tensor_latency_s": (30e-6, 0.7),
    "gpu_bytes_per_s": (150e9, 0.4),
    "node_bytes_per_s": (80e9, 0.5),
    "latency_s": (20e-6, 1.0),
    "update_passes": (30.0, 0.4),
    "step_s": (2e-3, 1.0),
    "head_slowdown": (1.3, 0.5),
    "overlap": (4.0, 0.5),
    "split_overlap": (2.0, 0.5),
}
"""Median and standard deviation of the log of each rate. An A100 has 312 TFLOP/s in half precision, of which large
products reach some 80 %, and 2.0 TB/s of memory, of which kernels reach some 70 %; NVLink carries 300 GB/s each way, of
which all-reduces reach some 70 %; a node has four to eight adapters of 25 GB/s. The rest is wide."""
LAYER_SD, HEAD_SD = 0.13, 0.2
"""Standard deviation of the factors' logs; found on the single-node measurements by maximum likelihood."""
REACH = 1.0
"""Doublings of a dimension after which the correlation of two shapes' factors has fallen to 1/e."""
GROWTH_SD = 0.015
"""Relative standard deviation for each doubling of the GPUs, of the data and of the pipeline size beyond the largest
observed one."""
NOISE = (0.002, 0.3)
"""Bounds of the relative noise of one observation."""
FIRST_NOISE = 0.06
MOST_ROWS = 2000
"""More observations than these are thinned at random (seed 0): the cost grows with the cube."""
LEVEL_Z = 1.645
"""Half width of a normal 90 % interval in standard deviations."""

_NAMES = tuple(field.name for field in fields(Rates))
_MEAN = np.log([PRIOR[name][0] for name in _NAMES])
_SD = np.array([PRIOR[name][1] for name in _NAMES])
PRIOR_RATES = Rates(*np.exp(_MEAN))
"""The rates before any observation."""
_STEP = 1e-5


@dataclass(frozen=True)
class Configurations:
    """What was or is to be trained, and how; arrays of one length. shapes: log2 of what a factor depends on."""

    model: Transformer
    plan: Plan
    shapes: np.ndarray

    @classmethod
    def of(cls, table: pd.DataFrame) -> "Configurations":
        value = {name: table[column].to_numpy(float) for column, name in CONFIGURATION.items()}
        model = Transformer(value["layers"], value["hidden"], value["heads"], value["sequence"])
        layout = {name: value[name] for name in ("micro_batch", "data", "tensor", "pipeline")}
        layout["micro_batches"] = np.ceil(value["samples"] / (value["micro_batch"] * value["data"]))
        fits = peak_memory(model, Plan(**layout)).total <= GPU_BYTES
        plan = Plan(**layout, recompute=np.where(fits, "none", "full"))
        names = ("hidden", "tensor", "micro_batch", "heads", "sequence")
        return cls(model, plan, np.log2(np.column_stack([value[name] for name in names])))

    def log_time(self, theta: np.ndarray, layer: float = 1.0, head: float = 1.0) -> np.ndarray:
        """Log of seconds with the log rates `theta`."""
        return np.log(predict(self.model, self.plan, Rates(*np.exp(theta)), layer, head).total_s)

    def by_rate(self, theta: np.ndarray) -> np.ndarray:
        """Derivatives of log time by the log rates, shape (rows, rates)."""
        here = self.log_time(theta)
        return np.column_stack([(self.log_time(theta + _STEP * row) - here) / _STEP for row in np.eye(len(theta))])

    def by_factor(self, theta: np.ndarray) -> np.ndarray:
        """Derivatives of log time by the logs of the two factors, times their standard deviations; shape (rows, 2)."""
        here = self.log_time(theta)
        layer, head = self.log_time(theta, layer=1 + _STEP), self.log_time(theta, head=1 + _STEP)
        return np.column_stack([LAYER_SD * (layer - here), HEAD_SD * (head - here)]) / _STEP


@dataclass(frozen=True)
class Fit:
    """Fitted log rates, the noise, and what the process needs of the observations."""

    theta: np.ndarray
    noise: float
    seen: Configurations
    weights: np.ndarray
    residuals: np.ndarray
    root: np.ndarray
    slopes: np.ndarray

    @property
    def rates(self) -> Rates:
        return Rates(*np.exp(self.theta))

    def predict(self, at: Configurations) -> tuple[np.ndarray, np.ndarray]:
        """Log of seconds and its standard deviation, linearised at the fitted rates."""
        weights = at.by_factor(self.theta)
        shared = _covariance(at.shapes, weights, self.seen.shapes, self.weights)
        mean = at.log_time(self.theta) + shared @ cho_solve((self.root, True), self.residuals)
        whitened = _whitened(self.root, shared.T)
        known = _whitened(self.root, self.slopes)
        left = at.by_rate(self.theta) - whitened.T @ known
        precision = known.T @ known + np.diag(_SD**-2)
        of_rates = np.einsum("ij,ji->i", left, np.linalg.solve(precision, left.T))
        of_factors = np.maximum((weights**2).sum(axis=1) - (whitened**2).sum(axis=0), 0.0)
        return mean, np.sqrt(of_rates + of_factors + self.noise**2 + (GROWTH_SD * self._doublings(at)) ** 2)

    def _doublings(self, at: Configurations) -> np.ndarray:
        """How far beyond the observed sizes: root of the sum of the squared doublings."""
        asked, known = at.plan, self.seen.plan
        sizes = ((asked.gpus, known.gpus), (asked.data, known.data), (asked.pipeline, known.pipeline))
        return np.sqrt(sum(np.maximum(np.log2(size / seen.max()), 0.0) ** 2 for size, seen in sizes))


def fit(observed: pd.DataFrame) -> Fit:
    """The fit of checked observations (read_observed)."""
    observed = observed.sort_values(list(CONFIGURATION))
    if len(observed) > MOST_ROWS:
        observed = observed.sample(MOST_ROWS, random_state=0)
    seen = Configurations.of(observed)
    measured = np.log(observed[TIME_MS].to_numpy(float) / 1e3)
    theta = _rates(seen, measured, FIRST_NOISE * np.eye(len(measured)), _MEAN)
    for _ in range(2):
        weights = seen.by_factor(theta)
        process = _covariance(seen.shapes, weights, seen.shapes, weights)
        noise = _noise(process, seen.by_rate(theta), measured - seen.log_time(theta), theta)
        root = _root(process, noise)
        theta = _rates(seen, measured, root, theta)
    return Fit(theta, noise, seen, weights, measured - seen.log_time(theta), root, seen.by_rate(theta))


def fit_and_predict(observed: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """`points` with TIME_MS, its 90 % interval LOW_MS to HIGH_MS, and NOTE: what was assumed, and what is new about the
    point. Tables as read_observed and read_points return them."""
    at, fitted = Configurations.of(points), fit(observed)
    mean, sd = fitted.predict(at)
    times = {TIME_MS: mean, LOW_MS: mean - LEVEL_Z * sd, HIGH_MS: mean + LEVEL_Z * sd}
    table = points.assign(**{name: 1e3 * np.exp(values) for name, values in times.items()})
    return table.assign(**{NOTE: _notes(observed, points, at)})


def read_observed(path: Path) -> pd.DataFrame:
    """Observed iteration times in `path`. Raises InputError with file, line, column, value and mend."""
    table = _read(path, (*CONFIGURATION, TIME_MS))
    if table.empty:
        raise InputError(f"{path}: has no rows; add at least one observation")
    times = pd.to_numeric(table[TIME_MS], errors="coerce").astype(float)
    refuse(~(np.isfinite(times) & times.between(1e-6, 1e12)), table, TIME_MS, path, "a time above 0, 1e-6 to 1e12 ms")
    table[TIME_MS] = times
    return table


def read_points(path: Path) -> pd.DataFrame:
    """Configurations in `path`; a column of times is left out."""
    return _read(path, tuple(CONFIGURATION))[list(CONFIGURATION)]


def split(table: pd.DataFrame, seed: int, by: list[str] | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two halves of a table, drawn with a seed: of its rows, or of the different values of the columns `by`."""
    groups = table.groupby(by or list(CONFIGURATION), sort=True).ngroup().to_numpy()
    chosen = np.random.default_rng(seed).permutation(groups.max() + 1)[: (groups.max() + 1) // 2]
    first = np.isin(groups, chosen)
    return table[first], table[~first]


def _rates(seen: Configurations, measured: np.ndarray, root: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Log rates of the highest posterior density, given the lower triangular root of the residuals' covariance."""

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([_whitened(root, seen.log_time(theta) - measured), (theta - _MEAN) / _SD])

    def slopes(theta: np.ndarray) -> np.ndarray:
        return np.vstack([_whitened(root, seen.by_rate(theta)), np.diag(1 / _SD)])

    return least_squares(residuals, start, jac=slopes, max_nfev=40).x


def _whitened(root: np.ndarray, values: np.ndarray) -> np.ndarray:
    return solve_triangular(root, values, lower=True, check_finite=False)


def _noise(process: np.ndarray, slopes: np.ndarray, residuals: np.ndarray, theta: np.ndarray) -> float:
    """Relative noise of the highest marginal likelihood, rates and factors integrated out (linearised)."""
    off = residuals + slopes @ (theta - _MEAN)
    explained = process + (slopes * _SD**2) @ slopes.T

    def cost(log_noise: float) -> float:
        root = _root(explained, float(np.exp(log_noise)))
        whitened = _whitened(root, off)
        return float(whitened @ whitened / 2 + np.log(np.diag(root)).sum())

    found = minimize_scalar(cost, bounds=np.log(NOISE), method="bounded", options={"xatol": 0.05})
    return float(np.exp(found.x))


def _root(covariance: np.ndarray, noise: float) -> np.ndarray:
    return cholesky(covariance + noise**2 * np.eye(len(covariance)), lower=True)


def _covariance(a: np.ndarray, weights_a: np.ndarray, b: np.ndarray, weights_b: np.ndarray) -> np.ndarray:
    """Of log times through the factors: exponential in the distance of the shapes (sum over the dimensions)."""
    apart = sum(np.abs(a[:, None, column] - b[None, :, column]) for column in range(a.shape[1]))
    return np.exp(-apart / REACH) * (weights_a @ weights_b.T)


def _notes(observed: pd.DataFrame, points: pd.DataFrame, at: Configurations) -> list[str]:
    """What was assumed of a point or is beyond what was observed; empty for most."""
    beyond = [(points[name] > observed[name].max()).to_numpy() for name in CONFIGURATION]
    uneven = at.plan.samples != points["global batch"].to_numpy()
    notes = []
    for row, full in enumerate(np.asarray(at.plan.recompute) == "full"):
        said = ["does not fit into 80 GB: full recomputation assumed"] * bool(full)
        said += ["global batch taken as a multiple of micro batch x data parallelism"] * bool(uneven[row])
        names = [name for name, above in zip(CONFIGURATION, beyond, strict=True) if above[row]]
        said += [f"beyond what was observed: {', '.join(names)}"] * bool(names)
        notes.append("; ".join(said))
    return notes


def _read(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    table = read_fields(path)
    known = (*CONFIGURATION, TIME_MS)
    for name in columns:
        if name not in table.columns:
            raise InputError(f"{path}: column {name!r} is missing; the columns are {', '.join(columns)}")
    unknown = [name for name in table.columns if name not in known]
    if unknown:
        raise InputError(f"{path}: column {unknown[0]!r} is not known; remove it, the columns are {', '.join(columns)}")
    for name in CONFIGURATION:
        values = pd.to_numeric(table[name], errors="coerce").astype(float)
        bad = ~(values.between(1, MOST) & (values == np.floor(values)))
        refuse(bad, table, name, path, f"a whole number from 1 to {MOST:.0e}")
        table[name] = values.astype(np.int64)
    gpus = table["tensor parallelism"] * table["data parallelism"] * table["pipeline parallelism"]
    refuse(table["# GPUs"] != gpus, table, "# GPUs", path, "tensor x data x pipeline parallelism")
    twice = table.duplicated(list(CONFIGURATION))
    if twice.any():
        line = int(np.flatnonzero(twice)[0]) + 2
        raise InputError(f"{path}: line {line}: repeats the configuration of an earlier line; remove or average them")
    return table
