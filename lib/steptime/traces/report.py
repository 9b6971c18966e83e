"""What a trace says, as lines of text."""

from collections.abc import Iterator

import pandas as pd

from steptime.traces.critical_path import by_name, critical_path, tasks
from steptime.traces.kineto import NOTHING
from steptime.traces.steps import Alignment, breakdown, waits


def show_lines(found: Alignment, step: int | None = None, top: int = 10) -> Iterator[str]:
    """The ranks, where each step's time goes, the collectives, the critical path of `step` (None: all); measured."""
    for trace, offset, spread in zip(found.traces, found.offset_s, found.spread_s, strict=True):
        size = "" if trace.world_size == NOTHING else f" of {trace.world_size}"
        clock = ""
        if len(found.traces) > 1:
            clock = f", clock moved by {1e3 * offset:.3g} ms (collectives differ by {1e3 * spread:.3g} ms)"
        yield f"rank {trace.rank}{size}: {trace.source}, {len(trace)} events{clock}"
    yield ""
    yield "where each step's time goes, ms (measured; communication: only what is exposed)"
    table = pd.concat([breakdown(trace) for trace in found.traces]).sort_values(["step", "rank"])
    yield from _lines(_milliseconds(table))
    messages = waits(found.traces)
    if len(messages):
        yield ""
        yield "collectives, ms (from the last rank's arrival; waiting: mean of the ranks)"
        kinds = messages.groupby(["operation", "n_bytes"], as_index=False).agg(
            times=("time_s", "size"), time_s=("time_s", "median"), wait_s=("wait_s", "median")
        )
        yield from _lines(_milliseconds(kinds))
    path = critical_path(found.traces, step, tasks(found.traces))
    yield ""
    what = "all steps" if step is None else f"step {step}"
    if path.empty:
        yield f"critical path of {what}: nothing ran"
        return
    yield f"critical path of {what}, {1e3 * path['end_s'].iloc[-1]:.4g} ms, {len(path)} tasks; ms"
    items = by_name(path).head(top)
    items["name"] = items["name"].str.slice(0, 60)
    yield from _lines(_milliseconds(items).assign(share=items["share"].map("{:.1%}".format)))


def _milliseconds(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of seconds in milliseconds, without the unit in their names."""
    seconds = [name for name in table.columns if name.endswith("_s")]
    table = table.assign(**{name: (1e3 * table[name]).map("{:.4g}".format) for name in seconds})
    return table.rename(columns={name: name.removesuffix("_s") for name in seconds})


def _lines(table: pd.DataFrame) -> list[str]:
    return table.to_string(index=False).splitlines()
