"""Step time at scales, batches and placements that were not measured, with a 90 % interval.

One step of a group (network | link | method) on w workers in n nodes with b samples a worker takes
    T = C + softplus(S - o C),   the communication S that the compute C does not hide (o: the share that can hide it),
    C = c (1 - q + q b/b0) (1 + h (1 - 1/g)) (1 + j sqrt(2 ln w)),
      g = ceil(w/n): workers of a node contend for its CPU and PCIe; j: all wait for the slowest of w (Gumbel 1958),
    S = (v R(w, n) + l L(w)) u_n,  v = v_in on one node, v_out on several.
R and L are the form: ring R = 2(w-1)/w; sharded servers R = 1; latency of a tree L = log2 w, of a ring L = w - 1
(Thakur et al. 2005). u_n and a factor of C for each batch carry over what a node count or a batch has of its own; they
and all parameters have priors. A group is fitted in log T with a loss that forgives outliers; in a second pass the
priors' centres come from the other groups by a ridge regression on the parts of the name (split at |), so that a
network seen on one link informs the same network on another. The form is the one that, fitted without the largest
scales, predicts them best, counting like groups too; where that cannot be asked (no group has two scales with several
nodes) the method's name decides: a part that ends in PS has servers. Intervals: linearised posterior and spread of the
residuals, multiplied to cover 90 % of the left-out scales up to twice the last, and a growth of S and T with the
doublings beyond the last scale.

Held-out data was looked at while this was built; data/published/held-out-looks.csv counts how often and says what was
chosen with its help. On the fit files alone: the terms of the model and, at each run, the form and the widths.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.special import expit

from steptime.model.observations import STEPS, check_observed, check_points

LEVEL_Z = 1.645
"""Half width of a normal 90 % interval in standard deviations."""
SOFTNESS = 0.15
"""Width of the softplus in units of C; 0.05 to 0.6 differ by 0.5 points of error on the Pollux fit file."""
MARGIN = 0.1
"""Another form replaces the expected one when its error on left-out scales is smaller by this share."""
GROWTH_SD, DRIFT_SD = 0.08, 0.03
"""Relative standard deviations of S and of T at twice the last observed scale; they grow as the doublings squared: a
wrong slope grows as the doublings, and the more of them, the likelier another regime (protocol, switch, straggler)."""
LEFT_OUT_ABOVE = (0.75, 0.5, 0.25)
FEWEST_SCALES = 2
"""A form is chosen by its errors on left-out scales only if each was fitted on so many scales with several nodes."""
NAMES = ("compute_s", "batch_share", "overlap", "contention", "out_s", "in_over_out", "latency_over_out", "jitter")
C, Q, OVERLAP, H, V, RHO, LAT, JITTER = range(len(NAMES))
PRIOR_MEAN = np.array([np.nan, 1.0, 0.0, -2.5, np.nan, -0.7, -4.0, -4.5])
PRIOR_SD = np.array([2.0, 1.5, 1.0, 1.0, 1.5, 1.5, 1.5, 1.0])
"""Priors of the parameters (log or logit); those of c and v are centred on the group's own times."""
METHOD_PRIOR = {"BSP": {OVERLAP: -2.0}, "WFBP": {LAT: -2.5}}
"""What a method's name says: BSP overlaps nothing; WFBP sends a message a layer, so that latency counts more."""
NODE_SD, BATCH_SD = 0.3, 0.1
"""Standard deviations of what a number of nodes has of its own in S, and a batch in C (also of C for each doubling
between a batch and the nearest observed one); smaller where the groups' factors say so."""


@dataclass(frozen=True)
class Form:
    """How the communication grows with workers and nodes."""

    name: str
    is_server: bool
    latency: str

    def rounds(self, workers: np.ndarray) -> np.ndarray:
        return {"none": 0 * workers, "tree": np.log2(workers), "ring": workers - 1.0}[self.latency]

    def volume(self, workers: np.ndarray) -> np.ndarray:
        return np.where(workers > 1, 1.5, 0.0) if self.is_server else 2 * (workers - 1) / workers


FORMS = (
    Form("ring + tree latency", False, "tree"),
    Form("ring", False, "none"),
    Form("ring + ring latency", False, "ring"),
    Form("sharded servers", True, "none"),
)


@dataclass(frozen=True)
class Points:
    """Where a group is evaluated; arrays of one length."""

    workers: np.ndarray
    nodes: np.ndarray
    batch: np.ndarray

    @classmethod
    def of(cls, table: pd.DataFrame) -> "Points":
        return cls(*(table[name].to_numpy(float) for name in ("workers", "nodes", "local_batch")))


@dataclass(frozen=True)
class Prior:
    """Centre and standard deviation of a group's parameters, of its node factors and of its batch factors."""

    mean: np.ndarray
    sd: np.ndarray
    node_sd: float = NODE_SD
    batch_sd: float = BATCH_SD
    noise: float = 0.05


@dataclass(frozen=True)
class Fit:
    """A fitted group: parameters followed by node and batch factors (log), and their covariance."""

    form: Form
    prior: Prior
    theta: np.ndarray
    covariance: np.ndarray
    nodes: np.ndarray
    batches: np.ndarray
    batch_unit: float
    spread: float
    seen: Points

    @property
    def rows(self) -> int:
        """How many observations it was fitted to."""
        return len(self.seen.workers)

    @property
    def largest(self) -> float:
        """The largest observed scale, workers; 1 without observations."""
        return float(self.seen.workers.max()) if self.rows else 1.0

    def log_time(
        self, at: Points, theta: np.ndarray | None = None, compute: float = 0.0, comm: float = 0.0
    ) -> np.ndarray:
        """log T at the points; `compute` and `comm` are added to log C and log S."""
        theta = self.theta if theta is None else theta
        k = len(NAMES)
        node = _effect(theta[k : k + len(self.nodes)], self.nodes, at.nodes)
        batch = _effect(theta[k + len(self.nodes) :], self.batches, at.batch)
        q, overlap = expit(theta[Q]), expit(theta[OVERLAP])
        per_node = np.ceil(at.workers / at.nodes)
        c = np.exp(theta[C] + batch + compute) * (1 - q + q * at.batch / self.batch_unit)
        c *= 1 + np.exp(theta[H]) * (1 - 1 / per_node)
        c *= 1 + np.exp(theta[JITTER]) * np.sqrt(2 * np.log(at.workers))
        v = np.exp(theta[V] + np.where(at.nodes == 1, theta[RHO], 0.0))
        s = v * (self.form.volume(at.workers) + np.exp(theta[LAT]) * self.form.rounds(at.workers)) * np.exp(node + comm)
        width = SOFTNESS * c
        hidden = np.logaddexp(0, -overlap / SOFTNESS)
        return np.log(c + width * (np.logaddexp(0, (s - overlap * c) / width) - hidden))

    def jacobian(self, at: Points, theta: np.ndarray) -> np.ndarray:
        """Derivatives of log T by the parameters and factors, shape (points, parameters); forward differences.

        The factors act through C or S alone, so that two differences serve them all; these are the last two columns.
        """
        step = 1e-6
        shifted = [self.log_time(at, theta + step * row) for row in np.eye(len(theta))[: len(NAMES)]]
        shifted += [self.log_time(at, theta, comm=step), self.log_time(at, theta, compute=step)]
        slopes = (np.array(shifted) - self.log_time(at, theta)).T / step
        by_comm, by_compute = slopes[:, -2:-1], slopes[:, -1:]
        by_node = by_comm * (at.nodes[:, None] == self.nodes)
        by_batch = by_compute * (at.batch[:, None] == self.batches)
        return np.hstack([slopes[:, :-2], by_node, by_batch, by_comm, by_compute])

    def predict(self, at: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log T at the points and two standard deviations: within the observed scales, and of the growth beyond."""
        centre = self.log_time(at)
        slopes = self.jacobian(at, self.theta)
        own, to_comm, to_compute = slopes[:, :-2], slopes[:, -2], slopes[:, -1]
        variance = np.einsum("pi,ij,pj->p", own, self.covariance, own) + self.spread**2
        new_node = (at.nodes > 1) & ~np.isin(at.nodes, self.seen.nodes) & bool(len(self.nodes))
        variance += to_comm**2 * new_node * self.prior.node_sd**2
        variance += (to_compute * self.prior.batch_sd * _doublings(at.batch, self.seen.batch)) ** 2
        doublings = np.maximum(np.log2(at.workers / self.largest), 0.0)
        return centre, np.sqrt(variance), doublings**2 * np.hypot(DRIFT_SD, to_comm * GROWTH_SD)

    def describe(self) -> str:
        """The form and its parameters as text."""
        t = self.theta
        values = {
            "c_s": np.exp(t[C]),
            "q": expit(t[Q]),
            "o": expit(t[OVERLAP]),
            "h": np.exp(t[H]),
            "j": np.exp(t[JITTER]),
            "v_out_s": np.exp(t[V]),
            "v_in_s": np.exp(t[V] + t[RHO]),
        }
        text = "; ".join(f"{name}={value:.3g}" for name, value in values.items())
        latency = "" if self.form.latency == "none" else f"; l_s={np.exp(t[V] + t[LAT]):.3g}"
        return f"{self.form.name}: {text}{latency}; b0={self.batch_unit:g}"


def _doublings(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Doublings between each value and the nearest known one; 0 where none is known."""
    if not len(known):
        return np.zeros(len(values))
    return np.abs(np.log2(values)[:, None] - np.log2(np.unique(known))).min(axis=1)


def _effect(values: np.ndarray, levels: np.ndarray, at: np.ndarray) -> np.ndarray:
    if not len(levels):
        return np.zeros(len(at))
    place = np.clip(np.searchsorted(levels, at), 0, len(levels) - 1)
    return np.where(levels[place] == at, values[place], 0.0)


def _levels(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The distinct values that have a factor of their own: those seen with two or more of `others`. A factor of
    another would take what is the trend's. None where fewer than two values have one."""
    pairs = pd.DataFrame({"value": values, "other": others}).drop_duplicates()
    counts = pairs["value"].value_counts()
    levels = np.sort(counts.index[counts >= 2].to_numpy(float))
    return levels if len(levels) >= 2 else levels[:0]


def fit_group(rows: pd.DataFrame, form: Form, prior: Prior, batch_unit: float) -> Fit:
    """The most probable parameters of one group given its rows (possibly none)."""
    at, seen = Points.of(rows), np.log(rows["step_time_s"].to_numpy(float))
    several = at.nodes > 1
    nodes, batches = _levels(at.nodes[several], at.workers[several]), _levels(at.batch, at.workers)
    mean = np.r_[prior.mean, np.zeros(len(nodes) + len(batches))]
    sd = np.r_[prior.sd, np.full(len(nodes), prior.node_sd), np.full(len(batches), prior.batch_sd)]
    fit = Fit(form, prior, mean, np.diag(sd**2), nodes, batches, batch_unit, prior.noise, at)
    if rows.empty:
        return fit
    noise = _row_noise(rows, prior.noise)
    found = least_squares(
        lambda theta: np.r_[(fit.log_time(at, theta) - seen) / noise, (theta - mean) / sd],
        mean,
        jac=lambda theta: np.vstack([fit.jacobian(at, theta)[:, :-2] / noise[:, None], np.diag(1 / sd)]),
        loss="soft_l1",
        ftol=1e-6,
    )
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    residual = np.abs(fit.log_time(at, found.x) - seen)
    free = max(len(rows) - len(found.x) / 2, 1)
    robust = np.quantile(residual, 0.9) / LEVEL_Z * np.sqrt(len(rows) / free)
    spread = np.sqrt((len(rows) * robust**2 + 4 * prior.noise**2) / (len(rows) + 4))
    return replace(fit, theta=found.x, covariance=covariance, spread=float(spread))


def _row_noise(rows: pd.DataFrame, typical: float) -> np.ndarray:
    """Relative standard deviation of each row: half its own variance, where one is given, and half the typical one."""
    own = (rows["step_time_std_s"] / rows["step_time_s"]).fillna(typical).to_numpy(float)
    return np.sqrt((np.minimum(own, 0.5) ** 2 + typical**2) / 2)


def extrapolate(observed: pd.DataFrame, at: pd.DataFrame) -> pd.DataFrame:
    """`at` with `step_time_s`, `lo_s`, `hi_s` (90 % interval) and `model` (form and parameters as text).

    observed: group, workers, nodes, local_batch, step_time_s, step_time_std_s; at: the first four. Rows of `at` keep
    their order; the order of `observed` does not matter. Every group is answered: one that has few or no observations
    gets the other groups' parameters, a wide interval, and says so in `model`. Raises InputError on bad rows.
    """
    observed = check_observed(observed, STEPS).sort_values(list(STEPS.key), ignore_index=True)
    at = check_points(at, STEPS)
    fits, scales = calibrated_fits(observed, sorted(set(observed["group"]) | set(at["group"])))
    out = at.copy()
    for group, rows in at.groupby("group"):
        fit = fits[group]
        centre, within, growth = fit.predict(Points.of(rows))
        half = LEVEL_Z * np.hypot(scales[group] * within, growth)
        out.loc[rows.index, "step_time_s"] = np.exp(centre)
        out.loc[rows.index, "lo_s"] = np.exp(centre - half)
        out.loc[rows.index, "hi_s"] = np.exp(centre + half)
        few = "" if fit.rows >= 3 else f"; only {fit.rows} observed: mostly prior, wide interval"
        out.loc[rows.index, "model"] = fit.describe() + few
    return out


def calibrated_fits(observed: pd.DataFrame, groups: list[str]) -> tuple[dict[str, Fit], dict[str, float]]:
    """The final fit of each group with its chosen form, and the factor on the standard deviation within its scales."""
    trials = {form: _left_out(observed, groups, form) for form in FORMS}
    chosen = {group: _choose(group, trials) for group in groups}
    errors = pd.concat([trials[form][trials[form]["group"] == group] for group, form in chosen.items()])
    return fit_groups(observed, chosen), {group: _width_factor(group, errors) for group in groups}


def fit_groups(observed: pd.DataFrame, forms: dict[str, Form]) -> dict[str, Fit]:
    """Two passes over the groups: each alone, then with priors centred on what the others say."""
    tables = {group: observed[observed["group"] == group] for group in forms}
    ratio = (observed["step_time_std_s"] / observed["step_time_s"]).median()
    noise = 0.03 if np.isnan(ratio) else float(np.clip(ratio, 0.005, 0.05))
    units = {g: float((t if len(t) else observed)["local_batch"].median()) for g, t in tables.items()}
    alone = {}
    for group, table in tables.items():
        times = (table if len(table) else observed)["step_time_s"]
        mean = PRIOR_MEAN.copy()
        for j, centre in METHOD_PRIOR.get(group.split("|")[-1].split("-")[0], {}).items():
            mean[j] = centre
        mean[C], mean[V] = np.log(0.7 * times.min()), np.log(0.5 * times.median())
        alone[group] = fit_group(table, forms[group], Prior(mean, PRIOR_SD, noise=noise), units[group])
    if len(forms) == 1:
        return alone
    priors = shared_priors(alone)
    return {group: fit_group(tables[group], forms[group], priors[group], units[group]) for group in forms}


def shared_priors(fits: dict[str, Fit]) -> dict[str, Prior]:
    """Each group's prior from the others: ridge regression of every parameter on the parts of the groups' names.

    A group's own estimate is left out of its centre (closed form), and the standard deviation is the error that the
    centres make. A parameter counts as far as a group's data, not its prior, determined it.
    """
    groups = list(fits)
    k = len(NAMES)
    parts = sorted({(i, part) for group in groups for i, part in enumerate(group.split("|"))})
    member = np.array([[dict(enumerate(group.split("|"))).get(i) == part for i, part in parts] for group in groups])
    design = np.c_[np.ones(len(groups)), member.astype(float)]
    penalty = np.diag(np.r_[1e-6, np.full(len(parts), 0.1)])
    values = np.array([fits[group].theta[:k] for group in groups])
    own_variance = np.array([np.diag(fits[group].covariance)[:k] for group in groups])
    own_prior = np.array([fits[group].prior.sd for group in groups]) ** 2
    known = np.clip(1 - own_variance / own_prior, 0, 1) * np.array([[fits[group].rows > 0] for group in groups])
    mean, sd = np.array([fits[group].prior.mean for group in groups]), np.sqrt(own_prior)
    for j in range(k):
        weight = known[:, j]
        if weight.sum() < 2:
            continue
        inverse = np.linalg.inv(design.T @ (weight[:, None] * design) * 10 + penalty)
        leverage = 10 * weight * np.einsum("ij,jk,ik->i", design, inverse, design)
        centre = design @ inverse @ design.T @ (10 * weight * values[:, j])
        left_out = (centre - leverage * values[:, j]) / np.maximum(1 - leverage, 1e-3)
        error = np.sqrt(np.sum(weight * (left_out - values[:, j]) ** 2) / weight.sum())
        mean[:, j], sd[:, j] = left_out, np.clip(error, 0.2, PRIOR_SD[j])
    node_sd = _pooled_effect(fits, lambda f: f.theta[k : k + len(f.nodes)], 0.03, NODE_SD)
    batch_sd = _pooled_effect(fits, lambda f: f.theta[k + len(f.nodes) :], 0.01, BATCH_SD)
    noise = fits[groups[0]].prior.noise
    return {group: Prior(mean[i], sd[i], node_sd, batch_sd, noise) for i, group in enumerate(groups)}


def _pooled_effect(fits: dict[str, Fit], part: Callable[[Fit], np.ndarray], floor: float, default: float) -> float:
    """Root mean square of the factors of all groups that have some."""
    found = [part(fit) for fit in fits.values() if len(part(fit))]
    return float(np.clip(np.sqrt(np.mean(np.concatenate(found) ** 2)), floor, default)) if found else default


def _left_out(observed: pd.DataFrame, groups: list[str], form: Form) -> pd.DataFrame:
    """Errors (log) and standard deviations at scales above 3/4, 1/2 and 1/4 of each group's largest, fitted below."""
    largest = observed.groupby("group")["workers"].transform("max")
    out = [
        pd.DataFrame(
            columns=["group", "workers", "nodes", "error", "within", "growth", "share", "ratio", "scales", "rows"]
        )
    ]
    for share in LEFT_OUT_ABOVE:
        below = observed["workers"] <= largest * share
        train, test = observed[below], observed[~below]
        scales = train[train["nodes"] > 1].groupby("group")["workers"].nunique()
        test = test[test["group"].isin(scales.index[scales >= FEWEST_SCALES])]
        if test.empty:
            continue
        fits = fit_groups(train, dict.fromkeys(sorted(set(train["group"])), form))
        for group, rows in test.groupby("group"):
            centre, within, growth = fits[group].predict(Points.of(rows))
            error = np.log(rows["step_time_s"]) - centre
            kept = rows[["group", "workers", "nodes"]].assign(share=share, ratio=rows["workers"] / fits[group].largest)
            out.append(kept.assign(error=error, within=within, growth=growth, scales=scales[group], rows=len(rows)))
    return pd.concat(out[1:] or out, ignore_index=True)


def _expected(group: str) -> Form:
    """What the method's name says: parameter servers (it ends in PS) or else a collective among the workers."""
    return next(form for form in FORMS if form.is_server == group.endswith("PS"))


def _likeness(one: str, other: str) -> float:
    """How much `other` says about the form of `one`: 1 for itself, less by the unlike parts, 0 for unlike methods."""
    if _expected(one) != _expected(other):
        return 0.0
    a, b = one.split("|"), other.split("|")
    return 0.4 + 0.6 * sum(x == y for x, y in zip(a, b, strict=False)) / max(len(a), len(b))


def _choose(group: str, trials: dict[Form, pd.DataFrame]) -> Form:
    """The form with the smallest mean error (each row's cut at 0.5) on left-out scales, like groups counted too.

    Only where half of the scale or more was left out: nearer by, the forms hardly differ and noise would choose.
    """
    expected = _expected(group)
    losses = {expected: 0.0}
    for form, table in trials.items():
        table = table[table["share"] <= 0.5]
        likeness = table["group"].map(lambda name: _likeness(group, name)).astype(float)
        if likeness.sum() > 0:
            weight = likeness * table["scales"] / table["rows"]
            loss = np.average(table["error"].abs().clip(upper=0.5), weights=weight)
            losses[form] = loss * (1 - MARGIN) if form == expected else loss
    return min(losses, key=lambda form: losses[form])


def _width_factor(group: str, errors: pd.DataFrame) -> float:
    """What `within` is multiplied by so that, with the growth, 90 % of left-out scales to twice the last are covered.

    Placements, not rows, are counted: batches of one placement err together. The group's own are blended with all
    groups' (worth 10 placements) and with 1 (worth 5).
    """
    errors = errors[errors["ratio"] <= 2]
    if errors.empty:
        return 1.0
    asked = (errors["error"].astype(float) / LEVEL_Z) ** 2 - errors["growth"].astype(float) ** 2
    factor = np.sqrt(np.maximum(asked, 0.0)) / errors["within"].astype(float)
    own = errors["group"] == group
    count = len(errors.loc[own, ["workers", "nodes"]].drop_duplicates())
    own_quantile = factor[own].quantile(0.9) if count else 0.0
    blended = (count * own_quantile + 10 * factor.quantile(0.9) + 5) / (count + 15)
    return float(np.clip(blended, 0.5, 4.0))
