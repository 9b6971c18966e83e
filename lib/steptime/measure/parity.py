"""Parity before speed, measured: does every setting compute the described network, and does it train?

The reference is `torch` in float32 on the CPU. A pair (setting and dtype, network) is built in a child from the same
weights and batch; parameters, shapes and counted operations are compared with the description, outputs, loss and every
gradient with the reference, dropout off: ||a - b|| / ||b|| per tensor.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steptime import frameworks, networks
from steptime.core.campaign import as_table
from steptime.core.errors import InputError
from steptime.core.files import read_json, write_table, write_text
from steptime.core.network import Network
from steptime.core.parity import PARITY
from steptime.frameworks.environments import ENVIRONMENTS
from steptime.measure.fingerprint import short_hash
from steptime.measure.provenance import code_facts
from steptime.networks.costs import matrix_products

REFERENCE = "torch"
BATCH = 8
TRAINING_STEPS = 40
LEARNING_RATE = 0.01
TIMEOUT_S = 900.0
"""For one request: compiling without kept programs takes minutes."""

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"width": 0.25},
    "lenet": {"width": 0.5, "image": 20},
    # 24 and 64 channels under its normalisation: kernels for multiples of 8 are not those of other numbers.
    "alexnet": {"width": 0.25},
    "googlenet": {"width": 0.25, "depth": 1},
    "resnet50": {"width": 0.25, "depth": 1},
    "vgg16": {"width": 0.125, "depth": 2},
    "vgg19": {"width": 0.125, "depth": 2},
    "inception3": {"width": 0.25},
    "nin": {"width": 0.125, "depth": 1, "image": 67},
    "fcn5": {"width": 0.0625},
    "lstm": {"width": 0.25},
    "transformer": {"width": 0.125, "image": 16},
}
"""Variants of the quick sizes that take a second and have every kind of layer of their network."""

SEEDS = (5, 6, 7)
"""Gradients have to agree at one of them, outputs at every one that is tried.

Two values of a max-pooling window, or a ReLU's input and 0, can lie within a rounding of each other. There the gradient
jumps: it goes to one value or to the other, the two programs are both right, and no tolerance says anything. A wrong
gradient is wrong at every seed.
"""


@dataclass(frozen=True)
class Tolerance:
    """Largest distance of outputs and loss, and of gradients: each tensor's, or of all of them as one vector."""

    outputs: float
    gradients: float
    of_each_tensor: bool
    reason: str


_SUMS = "sums in another order, rounded to 2^-24; small sums of large terms, as a batch norm's shift, lose most"
_FUSED = "as above, and fused operations keep intermediate values that others round"
_BFLOAT16 = (
    "operands rounded to 2^-9 in every layer, compared with float32: where a share e of the ReLUs changes side, "
    "gradients change by about sqrt(e); a small tensor that is a sum of large terms may be all rounding, so they count "
    "as one vector"
)
_NORMALISED = "as above; each batch norm divides by the spread of few values, and so raises what rounding did before it"
TOLERANCES = {
    ("float32", "eager"): Tolerance(1e-4, 2e-4, True, _SUMS),
    ("float32", "graph"): Tolerance(1e-4, 2e-4, True, _SUMS),
    ("float32", "compiled"): Tolerance(1e-4, 5e-4, True, _FUSED),
    ("bfloat16", "without batch norm"): Tolerance(0.05, 0.3, False, _BFLOAT16),
    ("bfloat16", "with batch norm"): Tolerance(0.2, 0.8, False, _NORMALISED),
}
"""By dtype and kind of setting; bfloat16's by network.

That a setting's gradients are those of the network is shown in float32: bfloat16 runs the same program.
"""


def tolerance_of(dtype: str, kind: str, network: Network) -> Tolerance:
    """The tolerance of a pair."""
    if dtype == "bfloat16":
        normalised = any(layer.kind == "batch_norm" for layer in network.layers)
        kind = "with batch norm" if normalised else "without batch norm"
    return TOLERANCES[dtype, kind]


class Finished:
    """The finished pairs of an interrupted comparison, a file each in `folder`: {"key": …, "row": …}.

    The key is a hash of all that decides what comes of the pair: the network, both frameworks' versions, the code. What
    failed is not kept but tried again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._others = [frameworks.installed_version(REFERENCE), code_facts()["code_hash"]]

    def read(self, row: Mapping[str, Any], network: Network) -> dict[str, Any] | None:
        """The whole row of the pair that `row` begins, or None. Raises InputError for a file that is not JSON."""
        path = self._path(row)
        found = read_json(path) if path.is_file() else None
        if not isinstance(found, dict) or found.get("key") != self._key(row, network):
            return None
        kept: dict[str, Any] = found["row"]
        return kept

    def save(self, row: Mapping[str, Any], network: Network) -> None:
        if row["verdict"] in ("agrees", "differs", "not expressible"):
            write_text(self._path(row), json.dumps({"key": self._key(row, network), "row": row}))

    def clear(self, table: pd.DataFrame) -> None:
        """The comparison came to its end: the next one compares anew."""
        for row in table.to_dict("records"):
            self._path(row).unlink(missing_ok=True)

    def _path(self, row: Mapping[str, Any]) -> Path:
        return self._folder / f"{row['framework']}-{row['dtype']}-{row['network']}.json"

    def _key(self, row: Mapping[str, Any], network: Network) -> str:
        return short_hash([row["framework_version"], row["dtype"], network.to_json(), *self._others])


def parity(
    settings: Sequence[str] = (),
    names: Sequence[str] = (),
    report: Callable[[str], None] = print,
    *,
    partial: Path,
) -> pd.DataFrame:
    """A row of PARITY for each setting, each of its dtypes and each network; empty sequences: all there are.

    A pair that fails leaves a row that says why, and the others go on. Finished pairs are kept in the folder `partial`
    until all are: started again after an interruption, only the others are compared.
    """
    for name in names:
        if name not in networks.NAMES:
            raise InputError(f"network = {name!r}: unknown; known: {', '.join(networks.NAMES)}")
    for name in settings:
        if name not in frameworks.SETTINGS:
            raise InputError(f"framework = {name!r}: unknown; known: {', '.join(frameworks.SETTINGS)}")
    if frameworks.installed_version(REFERENCE) is None:
        raise InputError(f"{REFERENCE} is not installed; it is what the others are compared with; run make env")
    chosen = {name: networks.build(name, **SMALL.get(name, {})) for name in names or networks.NAMES}
    pairs = [
        (name, dtype)
        for name in dict.fromkeys(settings or frameworks.SETTINGS)
        for dtype in frameworks.SETTINGS[name].dtypes
    ]
    rows: list[dict[str, Any]] = []
    finished = Finished(partial)
    with tempfile.TemporaryDirectory() as folder, Session(REFERENCE, Path(folder)) as session:
        reference = Reference(session)
        for number, (name, dtype) in enumerate(pairs, start=1):
            for row in _setting_rows(name, dtype, chosen, reference, Path(folder), finished):
                rows.append(row)
                where = f"setting {number}/{len(pairs)} network {len(rows) - (number - 1) * len(chosen)}/{len(chosen)}"
                report(f"{where}: {_line(row)}")
    table = as_table(rows, PARITY)
    finished.clear(table)
    return table


def write_parity(table: pd.DataFrame, path: Path) -> None:
    """Write the table as CSV, whole or not at all, sorted by framework, dtype and network.

    An infinite distance (a value that is no number, another shape) is an empty cell; the verdict says that it differs.
    """
    order = table.sort_values(["framework", "dtype", "network"], kind="stable").replace([np.inf], np.nan)
    write_table(path, order, digits=3)


class Session:
    """One child that is used for a network after the other, and started again after it died."""

    def __init__(self, setting: str, folder: Path) -> None:
        self.setting, self._path = setting, folder / f"{setting}.npz"
        self._child: frameworks.Child | None = None

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        if self._child is None:
            self._child = frameworks.Child(self.setting)
        return self._child.request(command, timeout_s=TIMEOUT_S, **arguments)

    def build(self, network: Network, dtype: str, seed: int) -> dict[str, Any]:
        settings = {"batch": BATCH, "threads": 1, "seed": seed, "learning_rate": LEARNING_RATE, "dtype": dtype}
        return self.request("build", network=asdict(network), **settings)

    def arrays(self) -> dict[str, np.ndarray]:
        """Outputs, loss and gradients at the present weights."""
        self.request("gradients", path=str(self._path))
        with np.load(self._path) as arrays:
            return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Reference:
    """What the reference computes, each network and seed once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def __call__(self, network: Network, seed: int) -> dict[str, np.ndarray]:
        key = (network.to_json(), seed)
        if key not in self._kept:
            self._session.build(network, "float32", seed)
            self._kept[key] = self._session.arrays()
        return self._kept[key]


def distances(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """||a - b|| / ||b|| per tensor; infinite where shapes differ or a value is no number."""
    found = {}
    for name, array in theirs.items():
        if ours[name].shape != array.shape or not np.isfinite(ours[name]).all():
            found[name] = float("inf")
            continue
        norm, difference = np.linalg.norm(array), np.linalg.norm(ours[name] - array)
        found[name] = float(difference / norm) if norm else float("inf") if difference else 0.0
    return found


def compared(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The columns of PARITY that compare two sets of arrays; no gradients where ours has none (inference only)."""
    found = distances(ours, {name: array for name, array in theirs.items() if name in ours})
    columns: dict[str, Any] = {"worst_output": max(found.pop("outputs"), found.pop("loss", 0.0))}
    if found:
        worst = max(found, key=lambda name: found[name])
        squares = {name: np.sum(theirs[name] ** 2) for name in found}
        whole = sum(found[name] ** 2 * square for name, square in squares.items()) / sum(squares.values())
        columns |= {"worst_tensor": worst, "worst_gradient": found[worst], "whole_gradient": float(np.sqrt(whole))}
    return columns


def counted_flops_agree(network: Network, counted: Mapping[str, Any]) -> bool | None:
    """Whether the framework's own count of matrix products is the description's; None where it has no counter."""
    if counted["forward"] is None:
        return None
    expected = 0
    for layer in network.layers:
        expected += sum(matrix_products(layer.kind, layer.settings, layer.in_shapes, layer.out_shape).values())
    return bool(counted["forward"] == expected)


def _setting_rows(
    name: str,
    dtype: str,
    chosen: Mapping[str, Network],
    reference: Reference,
    folder: Path,
    finished: Finished,
) -> Iterator[dict[str, Any]]:
    version = frameworks.installed_version(name)
    missing = _mend(name) if version is None else frameworks.missing_packages(name)
    with Session(name, folder) as session:
        for network in chosen.values():
            variant = " ".join(f"{key}={value:g}" for key, value in SMALL.get(network.name, {}).items())
            row = {"framework": name, "framework_version": version, "network": network.name, "dtype": dtype}
            row["variant"] = f"{network.size} {variant}".strip()
            if missing:
                yield row | {"verdict": "not installed", "reason": missing}
                continue
            if kept := finished.read(row, network):
                yield kept
                continue
            try:
                row |= _pair(session, network, dtype, reference)
            except frameworks.ChildError as error:
                row |= {"verdict": "not expressible" if error.kind == "unsupported" else "failed", "reason": str(error)}
                if row["verdict"] == "failed":
                    session.close()
            finished.save(row, network)
            yield row


def _pair(session: Session, network: Network, dtype: str, reference: Reference) -> dict[str, Any]:
    """The columns of one pair. Raises ChildError."""
    setting = frameworks.SETTINGS[session.setting]
    tolerance = tolerance_of(dtype, setting.kind, network)
    row: dict[str, Any] = {
        "output_tolerance": tolerance.outputs,
        "gradient_tolerance": tolerance.gradients,
        "gradient_rule": "each tensor" if tolerance.of_each_tensor else "all as one",
    }
    outputs_agree, gradients_agree = True, False
    for seed in SEEDS:
        answer, theirs = session.build(network, dtype, seed), reference(network, seed)
        ours = session.arrays()
        missing = set(theirs) - set(ours)
        if missing and set(ours) - {"outputs", "loss"}:
            return row | {"verdict": "differs", "reason": f"no gradient of {', '.join(sorted(missing))}"}
        if not row.get("seed"):
            row |= _described(network, answer, session.request("flops"))
        row |= compared(ours, theirs) | {"seed": seed}
        outputs_agree &= row["worst_output"] <= tolerance.outputs
        measure = row.get("worst_gradient" if tolerance.of_each_tensor else "whole_gradient", 0.0)
        gradients_agree = measure <= tolerance.gradients
        if gradients_agree or not outputs_agree:
            break
    row |= _training(session, ours)
    agrees = {
        "parameters": row["parameters_agree"],
        "shapes": row["shapes_agree"],
        "operations": row["flops_agree"] is not False,
        "outputs": outputs_agree,
        "gradients": gradients_agree,
        "training": row["loss_falls"] is not False,
    }
    wrong = [what for what, right in agrees.items() if not right]
    reason = ", ".join(wrong) if wrong else None if "worst_gradient" in row else "inference only: outputs are compared"
    return row | {"verdict": "differs" if wrong else "agrees", "reason": reason}


def _described(network: Network, answer: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parameters": answer["parameters"],
        "parameters_agree": answer["parameters"] == network.parameter_count,
        "shapes_agree": answer["shapes"] == {layer.name: list(layer.out_shape) for layer in network.layers},
        "flops_agree": counted_flops_agree(network, counted),
    }


def _training(session: Session, before: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The loss of the pool's first batch, dropout off, before and after TRAINING_STEPS steps over the pool."""
    try:
        session.request("steps", count=TRAINING_STEPS)
    except frameworks.ChildError as error:
        if error.kind != "unsupported":
            raise
        return {"loss_falls": None}
    first, last = float(before["loss"]), float(session.arrays()["loss"])
    return {"loss_first": first, "loss_last": last, "loss_falls": last < first}


def _mend(name: str) -> str:
    environment = frameworks.SETTINGS[name].environment
    if environment is None:
        return f"pip install {frameworks.SETTINGS[name].distribution}"
    return f"steptime env create {environment}" if environment in ENVIRONMENTS else "has no environment yet"


def _line(row: Mapping[str, Any]) -> str:
    text = f"{row['framework']} {row['dtype']} {row['network']}: {row['verdict']}"
    if row.get("worst_output") is not None:
        text += f", outputs {row['worst_output']:.1e}"
    if row.get("worst_gradient") is not None:
        text += f", worst gradient {row['worst_gradient']:.1e} ({row['worst_tensor']})"
    return text + (f": {row['reason']}" if row.get("reason") else "")
