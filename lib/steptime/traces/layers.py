"""What each layer of a recorded step cost, forward and backward."""

import numpy as np
import pandas as pd

from steptime.traces.kineto import ANNOTATION, COPY, CPU_OP, KERNEL, MODULE, NOTHING, Trace
from steptime.traces.steps import INPUT_NAME, ROUNDING_S, STEP_NAME, steps


def layers(trace: Trace) -> pd.DataFrame:
    """Forward and backward time of each layer in each step: step, layer, forward_s, backward_s.

    A layer is the innermost nn.Module, else the innermost annotation, around an operation that autograd points back
    to; without either it is that operation, numbered in the step. With a device the time is that of the kernels
    launched from there. Operations without a backward pass belong to no layer.
    """
    inside, known = Ranges(trace), steps(trace)
    begins = known["start_s"].to_numpy()
    rows = []
    for lane, forward_at, back_lane, backward_at in trace.arrows:
        place = int(np.searchsorted(begins, forward_at, side="right")) - 1
        operation, back = inside.outermost(int(lane), forward_at), inside.outermost(int(back_lane), backward_at)
        if place >= 0 and operation is not None and back is not None:
            layer = inside.layer(int(lane), forward_at) or ""
            rows.append((int(known["step"].iloc[place]), layer, operation, back))
    table = pd.DataFrame(rows, columns=["step", "layer", "operation", "back"]).sort_values(["operation", "back"])
    unnamed = table["layer"] == ""
    table.loc[unnamed, "layer"] = [trace.names[trace.name[row]] for row in table.loc[unnamed, "operation"]]
    # Without a range to name them, the first, second … of the same operation in the step.
    number = table.groupby(["step", "layer"])["operation"].rank("dense").astype(int).astype(str)
    table.loc[unnamed, "layer"] = table["layer"] + "#" + number
    for name, column in (("forward_s", "operation"), ("backward_s", "back")):
        # An operation counts for the first layer that it is found for.
        own = ~table.duplicated(["step", column])
        table[name] = np.where(own, inside.seconds(table[column].to_numpy(int)), 0.0)
    return table.groupby(["step", "layer"], sort=False, as_index=False)[["forward_s", "backward_s"]].sum()


class Ranges:
    """Which operation, module and annotation is around a moment on a thread, and what it costs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        notes = trace.rows(ANNOTATION)
        other = rf"({STEP_NAME}|{INPUT_NAME}|\w+:\w+|Optimizer\.|DistributedDataParallel\.)"
        notes = notes[~trace.named(other)[trace.name[notes]]]
        self._modules = {lane: self._of(trace.rows(MODULE), lane) for lane in range(len(trace.lanes))}
        self._notes = {lane: self._of(notes, lane) for lane in range(len(trace.lanes))}
        self.tops = {lane: self._outer(self._of(trace.rows(CPU_OP), lane)) for lane in range(len(trace.lanes))}
        self._device_s = _launched_s(trace) if trace.has_device else None

    def _of(self, rows: np.ndarray, lane: int) -> np.ndarray:
        return rows[self.trace.lane[rows] == lane]

    def _outer(self, rows: np.ndarray) -> np.ndarray:
        """Those of sorted rows that are in none of the others."""
        if not len(rows):
            return rows
        reached = np.maximum.accumulate(self.trace.end_s[rows])
        return rows[np.concatenate(([True], self.trace.start_s[rows][1:] >= reached[:-1] - ROUNDING_S))]

    def _around(self, rows: np.ndarray, time_s: float) -> int | None:
        """The last begun of the rows that are open at a time."""
        place = int(np.searchsorted(self.trace.start_s[rows], time_s + ROUNDING_S, side="right"))
        for row in rows[:place][::-1][:200]:
            if self.trace.end_s[row] >= time_s:
                return int(row)
        return None

    def outermost(self, lane: int, time_s: float) -> int | None:
        return self._around(self.tops[lane], time_s)

    def layer(self, lane: int, time_s: float) -> str | None:
        for rows in (self._modules[lane], self._notes[lane]):
            row = self._around(rows, time_s)
            if row is not None:
                return self.trace.names[self.trace.name[row]].removeprefix("nn.Module: ")
        return None

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        trace = self.trace
        if self._device_s is None:
            return trace.end_s[rows] - trace.start_s[rows]
        result = np.zeros(len(rows))
        for number, row in enumerate(rows):
            start, cumulated = self._device_s[int(trace.lane[row])]
            low, high = np.searchsorted(start, (trace.start_s[row], trace.end_s[row]))
            result[number] = cumulated[high] - cumulated[low]
        return result


def _launched_s(trace: Trace) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each thread: when it launched work, and the device seconds launched before each of these, from 0 on."""
    device = np.flatnonzero(np.isin(trace.category, (KERNEL, COPY)) & (trace.correlation != NOTHING))
    cost = pd.Series(trace.end_s[device] - trace.start_s[device]).groupby(trace.correlation[device]).sum()
    host = np.flatnonzero((trace.category != KERNEL) & (trace.category != COPY) & (trace.correlation != NOTHING))
    result = {}
    for lane in range(len(trace.lanes)):
        calls = host[trace.lane[host] == lane]
        seconds = cost.reindex(trace.correlation[calls]).fillna(0.0).to_numpy()
        result[lane] = (trace.start_s[calls], np.concatenate(([0.0], np.cumsum(seconds))))
    return result
