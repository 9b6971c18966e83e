# %% [markdown]
# # What does a profiler's trace say of a step, and of more workers?
#
# PyTorch's profiler writes one file a rank. From them: the ranks' clocks, where each step's time goes, which chain of
# tasks decided its length, what each layer cost; then the recorded step on more workers: one rank's computing as it
# was, every collective costed anew on a link.
#
# Clocks: a collective ends on all ranks together, so a rank's clock is moved by the median difference of the ends,
# within what causality allows. The critical path goes backwards from the step's last end: before each task stands the
# one whose end let it start; a collective starts when the last rank has arrived.

# %% tags=["parameters"]
out: str = ""
trace: str = "lenet-gloo-2"
links: list[str] = ["1gbe", "10gbe", "100gb-ib"]
workers: list[int] = [2, 4, 8, 16, 32, 64]
grow_to: int = 8

# %%
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, read_text, write_table
from steptime.core.machine import read_link
from steptime.model.growing import grow, grow_table, grown_timeline, replay
from steptime.notebook import out_folder
from steptime.report import recordings, style
from steptime.traces.critical_path import by_name, critical_path, tasks
from steptime.traces.kineto import read_traces
from steptime.traces.layers import layers
from steptime.traces.perfetto import write_timeline
from steptime.traces.recorded import recorded_steps, timeline
from steptime.traces.steps import PARTS, aligned, breakdown, waits

root = project_root()
folder = out_folder(out, "trace")
style.use()
paths = sorted((root / "data/traces" / trace).glob("rank*.json.gz"))
if not paths:
    raise InputError(f"trace: trace = {trace!r}: data/traces has no such folder; use one of its names")
chosen = [read_link(root / "data/machines/links", name) for name in links]


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def in_ms(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of seconds in milliseconds, named so; the first column as the index."""
    seconds = [name for name in table.columns if name.endswith("_s")]
    shown = table.assign(**{name: (1e3 * table[name]).map("{:.2f}".format) for name in seconds})
    names = {name: f"{name.removesuffix('_s').replace('_', ' ')}, ms" for name in seconds}
    return shown.rename(columns=names).set_index(table.columns[0])


found = aligned(read_traces(paths))
traces = found.traces
about = next(line for line in read_text(root / "data/traces/README.md").splitlines() if f"`{trace}`" in line)
_, _, what, where, how, _ = (cell.strip() for cell in about.split("|"))
events = " and ".join(f"{len(one):,}" for one in traces)
display(Markdown(f"**{trace}** (measured): {what}. {where[0].upper()}{where[1:]}. {how}. Events: {events}."))

# %% [markdown]
# ## One clock
#
# Files have clocks of their own. These two workers shared one machine's, so the true offset is nought, and what is
# found is the error of finding it.

# %%
clocks = pd.DataFrame(
    {"rank": [one.rank for one in traces], "offset_s": found.offset_s, "spread_s": found.spread_s}
).assign(messages=found.messages)
save(clocks, "clocks")
worst_us = 1e6 * float(clocks["offset_s"].abs().max())
display(
    Markdown(
        f"Moved by {worst_us:.1f} µs at most, from {found.messages} collectives whose own differences scatter by "
        f"{1e6 * float(clocks['spread_s'].max()):.0f} µs (median): threads hear of an end late."
    )
)

# %% [markdown]
# ## Where each step's time goes (measured)
#
# Each moment counts once: computing; reading input; communicating while nothing is computed (exposed); idle.

# %%
parts = pd.concat([breakdown(one) for one in traces], ignore_index=True).sort_values(["step", "rank"])
save(parts, "breakdown")
figure = recordings.step_parts(parts, "Where each step's time goes")
style.save(figure, folder / "figures/breakdown.svg")
display(figure)
share = parts[list(PARTS)].sum() / parts["step_s"].sum()
hidden = parts["hidden_s"].sum() / (parts["hidden_s"].sum() + parts["communication_s"].sum())
messages = waits(traces)
save(messages, "collectives")
kinds = messages.groupby(["operation", "n_bytes"], as_index=False).agg(
    messages=("time_s", "size"), time_s=("time_s", "median"), wait_s=("wait_s", "median")
)
display(in_ms(kinds))
waiting = float(messages["wait_s"].sum() / (messages["wait_s"].sum() + messages["time_s"].sum()))
display(
    Markdown(
        f"Computing {share['compute_s']:.0%}, exposed communication {share['communication_s']:.0%}, reading input "
        f"{share['input_s']:.1%}, idle {share['idle_s']:.0%}. {hidden:.0%} of the communication is hidden behind "
        f"computing. Of the time in collectives, {waiting:.0%} is waiting for the other rank, not sending: two workers "
        "on two cores that others use too are seldom ready together."
    )
)

# %% [markdown]
# ## One step (measured)
#
# The step of median length. The same bars for ui.perfetto.dev: `data/derived/trace/step.json`.

# %%
steps = recorded_steps(traces)
lengths = parts.groupby("step")["step_s"].max()
middle = int(lengths.sort_values().index[len(lengths) // 2])
line = timeline(traces, middle)
write_timeline(folder / "derived/step.json", line)
figure = recordings.rank_timeline(line, f"Step {middle} on both ranks")
style.save(figure, folder / "figures/timeline.svg")
display(figure)

# %% [markdown]
# ## The critical path over the ranks (measured)

# %%
given = tasks(traces)
table = []
for step in lengths.index:
    path = critical_path(traces, int(step), given)
    table.append(by_name(path).assign(step=step, length_s=path["end_s"].iloc[-1]))
path_items = pd.concat(table, ignore_index=True)
save(path_items, "critical_path")
whole = path_items["time_s"].sum()
top = path_items.groupby("name", as_index=False)["time_s"].sum().sort_values("time_s", ascending=False).head(8)
top["share of the path"] = (top["time_s"] / whole).map("{:.1%}".format)
top["time_s"] /= len(lengths)
display(in_ms(top.rename(columns={"time_s": "in a step_s"})))
sending = float(path_items.loc[path_items["name"].str.contains(":all_reduce"), "time_s"].sum() / whole)
between = float(path_items.loc[path_items["name"] == "(between tasks)", "time_s"].sum() / whole)
both = int((path_items[path_items["name"] != "(between tasks)"].groupby("step")["rank"].nunique() > 1).sum())
display(
    Markdown(
        f"Sending is {sending:.1%} of the path, the time between tasks (Python, launching, waking up) {between:.1%}; "
        f"the rest is computing. In {both} of {len(lengths)} steps the path goes over both ranks."
    )
)

# %% [markdown]
# ## Layers (measured)
#
# Autograd's arrows lead from each operation to its backward pass. Medians over steps and ranks.

# %%
of_layers = pd.concat([layers(one) for one in traces]).groupby("layer", sort=False, as_index=False).median()
of_layers = of_layers.drop(columns="step")
save(of_layers, "layers")
display(in_ms(of_layers))

# %% [markdown]
# ## The step on more workers (modelled)
#
# Of each recorded step the rank that computed longest: its computing as recorded, its collectives on a ring of the
# link, launched where they were launched and needed where they were waited for. All workers are taken to be alike, so
# what is lost to unequal workers at larger scale is not in it. Lines are medians, bands 10 to 90 % of the steps.

# %%
table = pd.concat([grow_table(steps, workers, link) for link in chosen], ignore_index=True)
save(table, "growth")
lowest, highest = (lambda values: values.quantile(0.1)), (lambda values: values.quantile(0.9))
spread = {"median_s": "median", "lo_s": lowest, "hi_s": highest}
grown = table.groupby(["link", "workers"], sort=False)["step_time_s"].agg(**spread).reset_index()
own = pd.DataFrame({"workers": len(traces), "step_s": [step.step_s for step in steps]})
recorded = own.groupby("workers")["step_s"].agg(**spread).reset_index()
figure = recordings.growth(grown, recorded, f"{trace} on more workers")
style.save(figure, folder / "figures/growth.svg")
display(figure)
shown = grown.pivot(index="link", columns="workers", values="median_s").loc[links]
display(shown.map(lambda seconds: f"{1e3 * seconds:.1f} ms"))
one = next(step for step in steps if step.step == middle)
write_timeline(folder / "derived/step_grown.json", grown_timeline(one, grow(one, grow_to, chosen[0])))
bytes_a_step = float(np.median([step.n_bytes.sum() for step in steps]))
slow, fast = (grown[(grown["link"] == name) & (grown["workers"] == max(workers))] for name in (links[0], links[-1]))
display(
    Markdown(
        f"{bytes_a_step / 1e6:.2f} MB a step in {len(one.operations)} messages, of which the backward pass hides what "
        f"fits behind it: on {max(workers)} workers the step is {1e3 * float(slow['median_s'].iloc[0]):.0f} ms on "
        f"{links[0]} and {1e3 * float(fast['median_s'].iloc[0]):.0f} ms on {links[-1]}. Step {middle} on {grow_to} "
        f"workers of {links[0]}, for ui.perfetto.dev: `data/derived/trace/step_grown.json`."
    )
)

# %% [markdown]
# ## Does replaying hold?
#
# Each recorded step again, its collectives with the median times that the **other** steps' messages of the same size
# took (from the last rank's arrival). Computing is the step's own, so this tests the order of launching and waiting and
# the collectives' times, not computing.

# %%
sent = pd.concat([pd.DataFrame({"step": step.step, "n_bytes": step.n_bytes, "time_s": step.time_s}) for step in steps])
rows = []
for step in steps:
    others = sent[sent["step"] != step.step].groupby("n_bytes")["time_s"].median()
    again = replay(step, len(traces), step.time_s)
    predicted = replay(step, len(traces), others.reindex(step.n_bytes).to_numpy(float))
    rows.append(
        {
            "step": step.step,
            "rank": step.rank,
            "waited_s": step.step_s - step.compute_s,
            "recorded_s": step.step_s,
            "replayed_s": again.step_s,
            "predicted_s": predicted.step_s,
            "error": predicted.step_s / step.step_s - 1,
        }
    )
replays = pd.DataFrame(rows)
save(replays, "replay")
# A step that waited for nothing is foretold by its own computing alone: no test.
errors = 100 * replays.loc[replays["waited_s"] > 1e-4, "error"].abs()
worst_replay = float((replays["replayed_s"] / replays["recorded_s"] - 1).abs().max())
display(in_ms(replays.assign(error=replays["error"].map("{:+.1%}".format))))
display(
    Markdown(
        f"With their own times the steps come back to {worst_replay:.1%}; what differs is waiting for the other rank, "
        f"which a replay of one rank leaves out. {len(errors)} of {len(replays)} steps waited for more "
        f"than 0.1 ms; foretold with the other steps' times, their median error is {errors.median():.1f} %, the "
        f"largest {errors.max():.1f} %. Where it is large, a message took several times its usual time."
    )
)

# %% [markdown]
# ## Claims

# %%
paper = read_paper(root / "data/published/dpro-2022.yaml")
figure_ = paper.figure("replay-error")
most = float((errors < figure_.value).mean())
claims = [
    Claim(
        id="replay-error",
        paper=paper.id,
        figure=figure_.id,
        claim=figure_.text,
        published=figure_.value,
        unit=figure_.unit,
        ours=float(errors.median()) if len(errors) else None,
        kind="modelled",
        tolerance="in shape: more than half of the steps that waited below the bound; one recording cannot do more",
        verdict=decide(figure_, False, in_shape=most > 0.5) if len(errors) else "inconclusive",
        why=f"{most:.0%} of the {len(errors)} steps that waited at all are within {figure_.value:g} %, the worst is "
        f"{errors.max():.0f} % off: messages on shared cores differ by a multiple; computing is each step's own",
        how="recorded step replayed with the median collective times of the other steps; torch, gloo, 2 workers of one "
        "machine, LeNet",
        data="data/derived/trace/replay.csv",
    )
]
write_claims(folder / "derived/claims/trace.json", claims)
for item in claims:
    display(
        Markdown(
            f"{item.claim}: published {item.published:g} %, ours {errors.median():.1f} %: **{item.verdict}**. "
            f"{item.why}."
        )
    )
