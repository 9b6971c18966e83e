"""What a framework's own engine does with its gradients, told from its steps alone.

A profile is replayed twice, once as it is and once with every pass much shorter, over the same link by the same engine.
What the short one's step grows by on N workers is the engine's communication with next to nothing to hide behind; what
the full one's grows by less is what backward hid.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from steptime.model.worker_cells import GLOO

FRAMEWORKS = {
    GLOO: "torch",
    "tensorflow_multiworker": "tensorflow",
    "mxnet_kvstore": "mxnet",
    "cntk_mpi": "cntk",
    "chainermn_mpi": "chainer",
    "caffe_mpi": "caffe",
}
"""The framework that an engine is of."""

DESCRIBED = {
    "tensorflow_multiworker/pack=0": ("one pack", "ring over gRPC, everything in one message", "end_of_backward"),
    "tensorflow_multiworker/pack=1048576": ("packs of 1 MiB", "ring over gRPC, packs of 1 MiB", "buckets"),
    "mxnet_kvstore/dist_sync=1": ("one server", "a key a layer to one server and back", "ps_central"),
    "mxnet_kvstore/dist_sync=2": ("two servers", "a key a layer to two servers and back", "ps_central"),
    "cntk_mpi/bits=32": ("32 bits", "all gradients after backward, MPI", "end_of_backward"),
    "cntk_mpi/bits=1": ("1 bit", "all gradients after backward, a bit a value, MPI", "end_of_backward"),
    "chainermn_mpi/naive": ("naive", "a message a layer after backward, MPI", "layers_after_backward"),
    "caffe_mpi/end_of_backward": ("after backward", "one message after backward, MPI", "end_of_backward"),
    "caffe_mpi/wait_free": ("wait-free", "a message a layer on a thread, MPI", "wait_free"),
}
"""ENGINE/SCHEDULE -> its short name, how it aggregates, and the schedule of `worker_steps` that this is nearest to."""

USUAL = ("caffe_mpi/wait_free", "cntk_mpi/bits=32", "mxnet_kvstore/dist_sync=1", "tensorflow_multiworker/pack=0")
"""The primary study's four frameworks, each as its engine is by default."""


@dataclass(frozen=True)
class Hidden:
    """Of an engine's communication on N workers: all of it (`communication_s`), what the full profile's step shows of
    it (`exposed_s`), and what backward hid of it (`hidden_s`) with bounds from both steps' intervals."""

    communication_s: float
    exposed_s: float
    hidden_s: float
    lo_s: float
    hi_s: float

    def share(self, backward_s: float) -> float:
        """Of what could be hidden: the shorter of communication and backward."""
        return self.hidden_s / min(self.communication_s, backward_s)


def key_of(row: pd.Series) -> str:
    """ENGINE/SCHEDULE of a row of `worker_cells.cell_table`."""
    return f"{row['engine']}/{row['schedule']}"


def name_of(key: str) -> str:
    """The framework first, in small letters, then what is particular."""
    engine, _, schedule = key.partition("/")
    short = DESCRIBED[key][0] if key in DESCRIBED else schedule.replace("_", " ")
    return f"{FRAMEWORKS[engine]}, {short}"


def hidden(full: pd.Series, full_alone: pd.Series, short: pd.Series, short_alone: pd.Series) -> Hidden:
    """From four rows of `cell_table`: N workers and a lone one with the full profile, the same with the short one.

    Bounds are those of the two steps of N workers together; without intervals there are none (NaN).
    """
    communication_s = float(short["median_s"] - short_alone["median_s"])
    exposed_s = float(full["median_s"] - full_alone["median_s"])
    down_s = float(np.hypot(full["hi_s"] - full["median_s"], short["median_s"] - short["lo_s"]))
    up_s = float(np.hypot(full["median_s"] - full["lo_s"], short["hi_s"] - short["median_s"]))
    hidden_s = communication_s - exposed_s
    return Hidden(communication_s, exposed_s, hidden_s, hidden_s - down_s, hidden_s + up_s)


def busiest_bytes(row: pd.Series) -> float:
    """What the busiest interface sends in a step: a worker's as counted, or a server's, which answers all workers."""
    if not str(row["schedule"]).startswith(("dist_", "ps_central")):
        return float(row["sent_bytes"])
    servers = int(row["ranks"] - row["workers"])
    return float(row["sent_bytes"]) * max(1.0, row["workers"] / max(servers, 1))


def pairs_in_order(predicted: dict[str, float], measured: dict[str, float]) -> tuple[int, int]:
    """(pairs that stand in the predicted order, pairs that the prediction tells apart by more than 1 %)."""
    names = sorted(predicted)
    told = [
        (a, b)
        for place, a in enumerate(names)
        for b in names[place + 1 :]
        if abs(predicted[a] / predicted[b] - 1) > 0.01
    ]
    agreeing = [(predicted[a] > predicted[b]) == (measured[a] > measured[b]) for a, b in told]
    return sum(agreeing), len(told)
