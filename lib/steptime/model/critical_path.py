"""What a simulated step was waiting for: the critical path, and what kept each device idle. Seconds."""

import numpy as np
import pandas as pd

from steptime.model.simulator import Simulated, as_served, edges_of
from steptime.model.tasks import KINDS, TaskGraph

WAITING = "lag"
"""The kind under which time on the critical path is counted that is no task's: an edge's lag (a slow link's)."""


def critical_path(simulated: Simulated) -> pd.DataFrame:
    """The tasks that decide the length, first to last: each starts when the one before has ended (plus a lag).

    Columns: name, kind, layer, worker, resource, lag_s (waited between the task before and this one), start_s, end_s.
    Durations and lags add up to the step. Raises InputError where a fair resource is in the graph.
    """
    served = as_served(simulated)
    graph = served.graph
    sources, lags = _decided_by(served)
    task = int(np.argmax(served.end_s)) if len(graph) else -1
    path: list[int] = []
    while task >= 0:
        path.insert(0, task)
        task = int(sources[task])
    names = [resource.name for resource in graph.resources] + [""]
    return pd.DataFrame(
        {
            "name": [graph.name(task) for task in path],
            "kind": [KINDS[graph.kind[task]] for task in path],
            "layer": [graph.layers[graph.layer[task]] if graph.layer[task] >= 0 else "" for task in path],
            "worker": graph.worker[path],
            "resource": [names[graph.resource[task]] for task in path],
            "lag_s": lags[path],
            "start_s": served.start_s[path],
            "end_s": served.end_s[path],
        }
    )


def path_by_kind_s(path: pd.DataFrame) -> pd.Series:
    """Seconds of the critical path by kind of task, its lags under WAITING; their sum is the step."""
    seconds = (path["end_s"] - path["start_s"]).groupby(path["kind"], sort=False).sum()
    lag = path["lag_s"].sum()
    return pd.concat([seconds, pd.Series({WAITING: lag})]) if lag > 0 else seconds


def device_waits(simulated: Simulated) -> pd.DataFrame:
    """How long each worker's device stood idle before a task, by the kind of what that task waited for last.

    Columns: worker, kind, wait_s.
    """
    served = as_served(simulated)
    graph = served.graph
    sources, _ = _decided_by(served)
    rows = []
    for index in _devices(graph):
        tasks = graph.on(index)
        idle = served.start_s[tasks] - np.concatenate([[0.0], served.end_s[tasks][:-1]])
        waited = (idle > 0) & (sources[tasks] >= 0)
        kinds = graph.kind[sources[tasks[waited]]]
        for kind in np.unique(kinds):
            rows.append((graph.resources[index].worker, KINDS[kind], float(idle[waited][kinds == kind].sum())))
    return pd.DataFrame(rows, columns=["worker", "kind", "wait_s"])


def exposed_communication_s(simulated: Simulated) -> pd.Series:
    """What each worker's device waited for communication, t_c_no of the S-SGD model: 0 where it did not.

    It includes waiting for the gradients of workers that are late.
    """
    waits = device_waits(simulated)
    graph = simulated.graph
    workers = pd.Index([graph.resources[index].worker for index in _devices(graph)], name="worker")
    exposed = waits[waits["kind"] == "communicate"].groupby("worker")["wait_s"].sum()
    return exposed.reindex(workers, fill_value=0.0)


def _devices(graph: TaskGraph) -> list[int]:
    return [index for index, resource in enumerate(graph.resources) if resource.name == "device"]


def _decided_by(simulated: Simulated) -> tuple[np.ndarray, np.ndarray]:
    """For each task the one that it waited for last, -1 for those at the beginning, and that edge's lag."""
    graph = simulated.graph
    before, after, lag, iterations = edges_of(graph)
    now = iterations == 0
    before, after, lag = before[now], after[now], lag[now]
    arrival = simulated.end_s[before] + lag
    # the last of each target's edges in this order is the latest; of equal ones that of the lowest task
    order = np.lexsort((-before, arrival, after))
    last = order[np.flatnonzero(np.diff(after[order], append=len(graph)))]
    sources, lags = np.full(len(graph), -1), np.zeros(len(graph))
    sources[after[last]], lags[after[last]] = before[last], lag[last]
    return sources, lags
