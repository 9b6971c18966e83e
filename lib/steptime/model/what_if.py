"""What would the step be if: many scenarios of one graph at once, each resource free, each suspected cause removed."""

from dataclasses import replace

import numpy as np
import pandas as pd

from steptime.core.errors import InputError
from steptime.model.simulator import as_served, edges_of, simulate, steady_step_s, topological_order
from steptime.model.tasks import TaskGraph

COLUMNS = 1024
"""Scenarios that are computed together: a column of so many ends stays in the nearest cache."""


def what_if(graph: TaskGraph, durations_s: np.ndarray, of: np.ndarray | None = None) -> np.ndarray:
    """One iteration under each column of `durations_s` (tasks x scenarios, seconds): the end of its last task.

    With `of` (tasks) the ends of those instead, tasks x scenarios. The order on every resource is the graph's; a fifo
    one needs `simulator.as_served` first. Each end is computed once a scenario: the latest of what the task waits for,
    plus its duration.
    """
    if any(resource.discipline != "ordered" for resource in graph.resources):
        raise InputError("what_if: a fifo or fair resource has no given order; see simulator.as_served")
    durations_s = np.ascontiguousarray(durations_s, dtype=float)
    if durations_s.ndim != 2 or len(durations_s) != len(graph):
        raise InputError(f"what_if: durations of shape {durations_s.shape}: must be {len(graph)} tasks by scenarios")
    plan, last = _plan(graph)
    kept = last if of is None else np.asarray(of)
    scenarios = durations_s.shape[1]
    result = np.empty((1 if of is None else len(kept), scenarios))
    for begin in range(0, scenarios, COLUMNS):
        columns = slice(begin, min(begin + COLUMNS, scenarios))
        ends = _ends(plan, durations_s[:, columns])
        result[:, columns] = ends[kept].max(axis=0) if of is None else ends[kept]
    return result[0] if of is None else result


def _plan(graph: TaskGraph) -> tuple[list[tuple[int, list[tuple[int, float]]]], np.ndarray]:
    """Tasks in topological order, each with what it waits for and the lags; and the tasks that nothing waits for."""
    before, after, lag, iterations = edges_of(graph)
    now = iterations == 0
    waits: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
    for source, target, seconds in zip(before[now].tolist(), after[now].tolist(), lag[now].tolist(), strict=True):
        waits[target].append((source, seconds))
    plan = [(task, waits[task]) for task in topological_order(graph).tolist()]
    return plan, np.setdiff1d(np.arange(len(graph)), before[now])


def _ends(plan: list[tuple[int, list[tuple[int, float]]]], durations_s: np.ndarray) -> np.ndarray:
    table = np.empty(durations_s.shape)
    ends, durations = list(table), list(durations_s)
    scratch = np.empty(durations_s.shape[1])
    for task, waits in plan:
        end = ends[task]
        if not waits:
            end[:] = durations[task]
            continue
        (source, lag), *others = waits
        start = ends[source] if not lag else np.add(ends[source], lag, out=end)
        for source, lag in others:
            arrival = ends[source] if not lag else np.add(ends[source], lag, out=scratch)
            start = np.maximum(start, arrival, out=end)
        np.add(start, durations[task], out=end)
    return table


def steady_s(graph: TaskGraph) -> float:
    """The step in steady state, also with fifo resources: they keep the order in which they served one iteration.

    That is exact where, as in synchronous training, no task of one iteration meets one of the next on such a resource.
    """
    if any(resource.discipline == "fifo" for resource in graph.resources):
        graph = as_served(simulate(graph)).graph
    return steady_step_s(graph)


def free(graph: TaskGraph, tasks: np.ndarray) -> TaskGraph:
    """The graph in which those tasks (a mask), and the lags after them, take no time."""
    return replace(
        graph,
        duration_s=np.where(tasks, 0.0, graph.duration_s),
        lag_s=np.where(tasks[graph.before], 0.0, graph.lag_s),
    )


def bottlenecks(graph: TaskGraph) -> pd.DataFrame:
    """For each resource the step in steady state if it took no time, the largest gain first.

    Columns: resource, busy_s (of the busiest worker, an iteration), free_step_s, gain_s, gain (share of the step). The
    gains need not add up: two resources that are both nearly full each gain little alone. Messages stay as they are
    merged.
    """
    step = steady_s(graph)
    names = np.array([resource.name for resource in graph.resources] + [""], dtype=object)[graph.resource]
    rows = []
    for name in dict.fromkeys(resource.name for resource in graph.resources):
        tasks = names == name
        without = steady_s(free(graph, tasks))
        busy = np.bincount(graph.resource[tasks], graph.duration_s[tasks]).max()
        rows.append((name, busy, without, step - without, (step - without) / step if step else 0.0))
    table = pd.DataFrame(rows, columns=["resource", "busy_s", "free_step_s", "gain_s", "gain"])
    return table.sort_values("gain_s", ascending=False, kind="stable", ignore_index=True)


# ----------------------------------------------------------------------------------------------- causes of a slow step

CAUSES = ("slow link", "slow layer", "straggler", "input stall", "host delay")


def cause_groups(graph: TaskGraph) -> dict[tuple[str, str], np.ndarray]:
    """The tasks (a mask) that each possible cause would have made longer, by cause and where.

    slow link: what one worker sends; slow layer: a layer's forward and backward on all workers; straggler: all that one
    worker computes; input stall: all reading, decoding and copying; host delay: all waiting for the host.
    """
    computes = graph.of_kind("forward", "backward", "update")
    groups: dict[tuple[str, str], np.ndarray] = {}
    for worker in np.unique(graph.worker[graph.worker >= 0]).tolist():
        groups["slow link", f"worker {worker}"] = graph.of_kind("communicate") & (graph.worker == worker)
        groups["straggler", f"worker {worker}"] = computes & (graph.worker == worker)
    for layer, name in enumerate(graph.layers):
        groups["slow layer", name] = graph.of_kind("forward", "backward") & (graph.layer == layer)
    groups["input stall", "all workers"] = graph.of_kind("input", "decode", "h2d")
    groups["host delay", "all workers"] = graph.of_kind("host")
    return {key: tasks for key, tasks in groups.items() if tasks.any()}


def rank_causes(graph: TaskGraph, observed_s: np.ndarray, reference_s: np.ndarray) -> pd.DataFrame:
    """What explains that the observed durations give a longer run than the reference's: the largest gain first.

    `graph` has every worker (not folded) and may be unrolled over iterations; `observed_s` and `reference_s` are
    durations of its tasks, as a trace of now and one of before (or the median of the workers) give them. Each cause is
    removed alone: its tasks get their reference durations, all else stays as observed. Columns: cause, where, end_s
    (of the last task, without the cause), gain_s.
    """
    groups = cause_groups(graph)
    scenarios = np.stack([observed_s, *(np.where(tasks, reference_s, observed_s) for tasks in groups.values())], axis=1)
    ends = what_if(graph, scenarios)
    table = pd.DataFrame(list(groups), columns=["cause", "where"]).assign(end_s=ends[1:], gain_s=ends[0] - ends[1:])
    return table.sort_values("gain_s", ascending=False, kind="stable", ignore_index=True)
