# %% [markdown]
# # What does a step wait for, and what would it be without that?
#
# One step of synchronous SGD as a graph: tasks (read, copy, forward, backward, communicate, update) with a duration and
# a resource, edges for what waits for what. The simulator finds when each task starts and ends; equal workers are
# simulated once. Everything here is simulated from measured layer profiles and other people's links; nothing is
# measured.
#
# Semantics: an ordered resource (a device, a ring's link) serves its tasks in the graph's order, a queue (a server)
# first come first served, each to its end. A ring's message of n bytes goes round in N chunks and 2(N - 1) rounds; a
# worker sends its chunk of a round once it has sent that of the round before and received the one that comes next.

# %% tags=["parameters"]
out: str = ""
framework: str = "torch"
networks: list[str] = ["alexnet", "resnet50"]
workers: int = 16
links: list[str] = ["1gbe", "10gbe", "56gb-ib", "100gb-ib"]
scenarios: int = 20000

# %%
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from steptime import networks as zoo
from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.core.machine import read_link
from steptime.core.step import AGGREGATIONS, COPIES, LayerProfile, Schedule
from steptime.model.collectives import line, ring
from steptime.model.critical_path import critical_path, exposed_communication_s, path_by_kind_s
from steptime.model.exchanges import CentralServer, Hierarchical, ShardedServer, ring_exchange
from steptime.model.fitting import profile_from_table
from steptime.model.schedules import Late, framework_schedules, pipeline_graph, ring_graph, step_graph
from steptime.model.simulator import iteration_ends_s, simulate, simulate_iterations, steady_step_s
from steptime.model.step import pipeline_step_s, predict_step
from steptime.model.what_if import bottlenecks, steady_s, what_if
from steptime.notebook import out_folder
from steptime.report import curves, simulations, style

root = project_root()
folder = out_folder(out, "simulator")
style.use()
chosen = {name: read_link(root / "data/machines/links", name) for name in links}
NANOSECOND = 1e-9


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def read(name: str) -> pd.DataFrame:
    """A table of the fit stage, committed campaigns only."""
    path = root / f"data/derived/fit/{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    table = pd.read_csv(path)
    return table[table["campaign"] != "local"]


layers, phases = read("layers"), read("phases")
plain = phases[(phases["framework"] == framework) & (phases["dtype"] == "float32") & (phases["device"] == "cpu")]
plain = plain[(plain["input"] == "sequential") & (plain["threads"] == 1)]


def profile_of(network: str) -> LayerProfile:
    """The layer profile of the network's case in the first committed campaign that has one."""
    cases = plain[plain["network"] == network]
    if cases.empty:
        raise InputError(
            f"simulator: networks = {network!r}: no committed campaign has {framework}'s layer profile of it"
        )
    case = cases.iloc[0]
    own = [
        table[(table[["campaign", "case_id"]] == case[["campaign", "case_id"]]).all(axis=1)]
        for table in (layers, cases)
    ]
    return profile_from_table(
        own[0],
        network=network,
        source=f"{case['campaign']}: {case['case_id']}",
        batch=int(case["batch"]),
        phases_s=own[1].set_index("phase")["time_s"].to_dict(),
    )


profiles = {name: profile_of(name) for name in networks}
display(Markdown("Layer profiles: " + "; ".join(profile.source for profile in profiles.values()) + "."))

# %% [markdown]
# ## The same step under each schedule
#
# One worker's tasks; the others do the same at the same time. Where the device is idle while the link is busy,
# communication is exposed.

# %%
first, link_name = networks[0], links[min(1, len(links) - 1)]
link, fast = chosen[link_name], chosen[links[-1]]
profile = profiles[first]
rings, message = ring_exchange(workers, link), line(link)
bucket = float(profile.parameter_bytes.sum()) / 4
SHOWN = {
    "after backward, one message": (Schedule("end_of_backward"), rings),
    "after backward, a message a layer": (Schedule("layers_after_backward"), rings),
    "wait-free": (Schedule("wait_free"), rings),
    "buckets of a quarter": (Schedule("buckets", bucket_bytes=bucket), rings),
    "merged, MG-WFBP's rule": (Schedule("published_merge"), rings),
    "merged, optimum": (Schedule("merged"), rings),
    "wait-free, sharded server": (Schedule("wait_free"), ShardedServer(workers, message)),
    "wait-free, one server": (Schedule("wait_free"), CentralServer(workers, message)),
}
if workers % 4 == 0:
    two_levels = Hierarchical(workers // 4, 4, line(fast), message)
    SHOWN["wait-free, two levels"] = (Schedule("wait_free"), two_levels)
timelines, rows = {}, []
for name, (schedule, exchange) in SHOWN.items():
    found = simulate(step_graph(profile, schedule, exchange))
    seconds = path_by_kind_s(critical_path(found))
    rows.append(
        {
            "schedule": name,
            "step_s": found.step_s,
            "exposed_s": float(exposed_communication_s(found).iloc[0]),
            "messages": int((found.graph.of_kind("communicate") & (found.graph.duration_s > 0)).sum()),
            "tasks": found.tasks,
            "path_communicate_s": float(seconds.get("communicate", 0.0)),
        }
    )
    if len(timelines) < 6:
        timelines[name] = found.timeline()
steps = pd.DataFrame(rows)
save(steps, "schedules")
figure = simulations.timelines(timelines, f"One step of {first}, {workers} workers, {link_name}, simulated")
style.save(figure, folder / "figures/timelines.svg")
display(figure)
shown = steps.assign(**{f"{name}, ms": 1e3 * steps[f"{name}_s"] for name in ("step", "exposed", "path_communicate")})
display(
    shown[["schedule", "step, ms", "exposed, ms", "path_communicate, ms", "messages"]]
    .rename(columns={"path_communicate, ms": "communication on the critical path, ms"})
    .set_index("schedule")
    .round(2)
)
slowest, fastest = steps.loc[steps["step_s"].idxmax()], steps.loc[steps["step_s"].idxmin()]
display(
    Markdown(
        f"The schedule alone makes a factor of {slowest['step_s'] / fastest['step_s']:.2f}: "
        f"{1e3 * fastest['step_s']:.1f} ms ({fastest['schedule']}) to {1e3 * slowest['step_s']:.1f} ms "
        f"({slowest['schedule']})."
    )
)

# %% [markdown]
# ## Simulator and closed forms
#
# Where a schedule has a closed form, both must agree: the S-SGD models in steady state, whatever is read ahead by whom,
# and the pipeline's $(m + p - 1)(t_f + t_b)$.

# %%
rows = []
for (network, each), (name, way), (ahead, copy, loaders), count in product(
    profiles.items(),
    chosen.items(),
    [(False, "with_read", 1), *((True, copy, loaders) for copy in COPIES for loaders in (1, 3))],
    (1, 2, workers, 64 * workers),
):
    # reading as slow as computing, so that either side of the maximum occurs
    slow = replace(each, t_io_s=each.t_f_s + each.t_b_s, t_h2d_s=each.t_f_s / 3)
    for aggregated in AGGREGATIONS:
        schedule = Schedule(aggregated, ahead, bucket, loaders, copy)
        by_graph = steady_step_s(step_graph(slow, schedule, ring_exchange(count, way)))
        by_form = predict_step(slow, schedule, count, way).step_s
        rows.append((network, name, aggregated, ahead, copy, loaders, count, by_graph, by_form))
columns = ["network", "link", "aggregation", "prefetch", "copy", "loaders", "workers", "simulated_s", "closed_form_s"]
forms = pd.DataFrame(rows, columns=columns)
forms["difference"] = (forms["simulated_s"] / forms["closed_form_s"] - 1).round(12) + 0.0  # no minus zero
save(forms, "closed_forms")
worst = float(forms["difference"].abs().max())
bubbles = [
    simulate(pipeline_graph([1.0] * stages, [2.0] * stages, count)).step_s / pipeline_step_s(1.0, 2.0, stages, count)
    - 1
    for stages, count in product((1, 2, 4, 8), (1, 4, 16))
]
display(
    Markdown(
        f"{len(forms)} combinations of network, link, aggregation, input and workers: largest relative difference "
        f"{'below 1e-12' if worst < 1e-12 else f'{worst:.0e}'}. {len(bubbles)} pipelines: "
        f"{'the same' if max(map(abs, bubbles)) < 1e-12 else 'not the same'}."
    )
)

# %% [markdown]
# ## Irregular workers
#
# A worker that is late holds up every other once. A slow link is waited for in each of the 2(N - 1) rounds, but the
# further a worker is behind it in the ring, the earlier it is through: what they have to spare absorbs part of it. What
# is simulated does not grow with the workers.

# %%
rows = []
many = 1024 * workers
for what, count in [("none", 0), *(("late", k) for k in (1, 2, 4, 16)), *(("slow link", k) for k in (1, 2, 4, 16))]:
    places = [place * (many // 16) for place in range(count)]
    late = {place: Late(delay_s=1e-3 * (number + 1)) for number, place in enumerate(places)} if what == "late" else {}
    slow_link = link.model_copy(update={"beta_s_per_byte": 4 * link.beta_s_per_byte})
    slow_links = dict.fromkeys(places, slow_link) if what == "slow link" else {}
    graph = ring_graph(profile, Schedule("merged"), many, link, late=late, slow_links=slow_links)
    rows.append((what, count, simulate(graph).step_s, len(graph)))
irregular = pd.DataFrame(rows, columns=["irregular", "count", "step_s", "tasks"])
irregular["more_s"] = irregular["step_s"] - irregular["step_s"].iloc[0]
save(irregular, "irregular")
by_slow = (1e3 * irregular.loc[irregular["irregular"] == "slow link", "more_s"]).tolist()
display(
    irregular.assign(**{"step, ms": 1e3 * irregular["step_s"], "more, ms": 1e3 * irregular["more_s"]})[
        ["irregular", "count", "step, ms", "more, ms", "tasks"]
    ]
    .set_index(["irregular", "count"])
    .round(2)
)
display(
    Markdown(
        f"{many:,} workers, merged messages, {link_name}; workers late by 1 ms, 2 ms and so on, slow links at "
        f"a quarter of the bandwidth. One slow link costs {by_slow[0]:.1f} ms, sixteen {by_slow[-1]:.1f} ms: what one "
        "makes wait, the others absorb. "
        f"{int(irregular['tasks'].max()):,} tasks at most."
    )
)

# %% [markdown]
# ## Steady state
#
# Two loaders of 3 s each and 1 s of computing: the gaps between updates alternate for ever, and no single one is the
# step. The simulator takes the largest ratio of a cycle's length to the iterations that it spans.

# %%
slow_reading = LayerProfile(
    "two loaders", "planted", 1, ("all",), np.array([0.5]), np.array([0.5]), np.zeros(1), np.zeros(1), t_io_s=3.0
)
graph = step_graph(slow_reading, Schedule(prefetch=True, loaders=2), ring_exchange(1, link))
gaps = np.diff(iteration_ends_s(simulate_iterations(graph, 9)))
steady = steady_step_s(graph)
display(
    Markdown(
        f"Gaps: {', '.join(f'{gap:g}' for gap in gaps)} s. Steady state: {steady:g} s a step (simulated), "
        f"t_io / loaders = {slow_reading.t_io_s / 2:g} s (closed form)."
    )
)

# %% [markdown]
# ## Bottlenecks, with the gain of removing them
#
# For each network and link the step with the input read ahead, wait-free on a ring; and what it would be if one
# resource took no time. Gains need not add up.

# %%
tables = []
for (network, each), (name, way) in product(profiles.items(), chosen.items()):
    graph = step_graph(each, Schedule("wait_free", prefetch=True), ring_exchange(workers, way))
    table = bottlenecks(graph)
    table[["gain_s", "gain"]] = table[["gain_s", "gain"]].round(12) + 0.0
    table.insert(0, "step_s", steady_s(graph))
    for place, (key, value) in enumerate({"network": network, "link": name, "workers": workers}.items()):
        table.insert(place, key, value)
    tables.append(table)
found = pd.concat(tables, ignore_index=True)
save(found, "bottlenecks")
marks = found.assign(
    name=found["network"] + ", " + found["link"], left=found["free_step_s"] / found["step_s"], kind="simulated"
)
figure = simulations.free_steps(marks, f"If it took no time: {workers} workers, wait-free, simulated")
style.save(figure, folder / "figures/bottlenecks.svg")
display(figure)
worst_of = found.sort_values("gain_s", ascending=False, kind="stable").drop_duplicates(["network", "link"]).sort_index()
display(
    worst_of.assign(**{"step, ms": 1e3 * worst_of["step_s"], "without it, ms": 1e3 * worst_of["free_step_s"]})
    .rename(columns={"resource": "bottleneck"})[["network", "link", "step, ms", "bottleneck", "without it, ms"]]
    .set_index(["network", "link"])
    .round(2)
)

# %% [markdown]
# ## When does overlap pay?
#
# Wait-free back-propagation can hide at most the shorter of backward and communication. So it should gain most where
# the two are about equal: on one side there is little to hide, on the other little to hide it behind. A sweep over
# links of all speeds, every one simulated with and without overlap; a message a layer in both, so that only the overlap
# differs.

# %%
rng = np.random.default_rng(1)
factors = np.sort(np.exp(rng.uniform(np.log(1e-2), np.log(1e2), scenarios)))
parts, peaks = [], {}
for network, each in profiles.items():
    sides = {}
    for name in ("wait_free", "layers_after_backward"):
        graph = ring_graph(each, Schedule(name), workers, link)
        scale = np.where(graph.of_kind("communicate")[:, None], factors, 1.0)
        sides[name] = what_if(graph, graph.duration_s[:, None] * scale)
    gain = 1 - sides["wait_free"] / sides["layers_after_backward"]
    ratio = factors * predict_step(each, Schedule(), workers, link).t_c_s / each.t_b_s
    edges = np.logspace(-2, 2, 41)
    place = np.digitize(ratio, edges)
    inside = (place > 0) & (place < len(edges))
    binned = pd.DataFrame({"x": ratio, "y": 100 * gain, "bin": place})[inside].groupby("bin", as_index=False).mean()
    parts.append(binned.assign(network=network, series=network, kind="simulated"))
    peaks[network] = (float(ratio[gain.argmax()]), float(gain.max()))
overlap = pd.concat(parts, ignore_index=True)[["network", "series", "kind", "x", "y"]]
save(overlap.rename(columns={"x": "communication_over_backward", "y": "gain_percent"}), "overlap")
figure = curves.curves(
    overlap,
    f"Gain of overlap, {workers} workers: {scenarios:,} links",
    ("communication / backward, t_c / t_b", "step saved, %"),
    logarithmic=(True, False),
)
style.save(figure, folder / "figures/overlap.svg")
display(figure)
display(
    Markdown(
        "Largest gain: "
        + "; ".join(f"{name} {gain:.0%} at t_c / t_b = {ratio:.2f}" for name, (ratio, gain) in peaks.items())
        + "."
    )
)

# %% [markdown]
# ## Four frameworks as schedules
#
# What Caffe-MPI, CNTK, MXNet and TensorFlow overlapped in the S-SGD study is recalled, not checked: so these are models
# to test on the real ones. The same profile goes into each; TensorFlow's server handles a message in 0.1 ms beside the
# link (an assumption).

# %%
REQUEST_S = 1e-4
rows = []
for (network, each), count in product(profiles.items(), (2, 4, 8, 16, 32)):
    alone = steady_s(step_graph(each, Schedule(prefetch=True), ring_exchange(1, link)))
    for name, of in framework_schedules(count, link, REQUEST_S).items():
        step = steady_s(step_graph(each, of.schedule, of.exchange))
        rows.append((network, name, count, step, alone / step))
as_frameworks = pd.DataFrame(rows, columns=["network", "framework", "workers", "step_s", "efficiency"])
save(as_frameworks, "frameworks")
for network, part in as_frameworks.groupby("network", sort=False):
    figure = curves.curves(
        part.assign(x=part["workers"], y=100 * part["efficiency"], series=part["framework"], kind="simulated"),
        f"Scaling efficiency of four schedules: {network}, {link_name}",
        ("workers", "efficiency, %"),
        logarithmic=(True, False),
    )
    style.save(figure, folder / f"figures/frameworks-{network}.svg")
    display(figure)
same = as_frameworks.pivot_table(index=["network", "workers"], columns="framework", values="step_s")
apart = float((same["mxnet"] / same["caffe-mpi"] - 1).abs().max())
display(
    Markdown(
        f"Caffe-MPI's ring and MXNet's servers on every node are at most {apart:.1%} apart: they send as many bytes in "
        "as many messages."
    )
)

# %% [markdown]
# ## Claims

# %%
papers = {name: read_paper(root / f"data/published/{name}.yaml") for name in ("ssgd-2017", "ssgd-dag-2018")}
form = papers["ssgd-2017"].figure("process-models")
use = papers["ssgd-dag-2018"].figure("link-use-resnet50")
resnet = zoo.build("resnet50", size="full")
sizes = np.array([layer.parameter_count * 4.0 for layer in resnet.layers if layer.kind in ("conv", "dense")])
infiniband = read_link(root / "data/machines/links", "100gb-ib")
cost = ring(16, infiniband)
used = pd.DataFrame({"n_bytes": sizes, "all_reduce_s": cost.time_s(sizes), "at_bandwidth_s": cost.b_s_per_byte * sizes})
save(used, "link_use")
share = 100 * float(used["at_bandwidth_s"].sum() / used["all_reduce_s"].sum())
claims = [
    Claim(
        id="closed-forms-are-the-graph",
        paper="ssgd-2017",
        figure=form.id,
        claim="The models of the standard processes are what the task graph does in steady state: largest difference",
        published=form.value,
        unit="%",
        ours=round(100 * worst, 10),
        kind="simulated",
        tolerance="holds: below 1e-7 %",
        verdict=decide(form, 100 * worst < 1e-7),
        why=f"{len(forms)} combinations of network, link, aggregation, input and workers",
        how="maximum cycle ratio of the task graph against the closed forms, both from the committed layer profiles",
        data="data/derived/simulator/closed_forms.csv",
    ),
    Claim(
        id=use.id,
        paper="ssgd-dag-2018",
        figure=use.id,
        claim=use.text,
        published=use.value,
        unit=use.unit,
        ours=round(share, 2),
        kind="modelled",
        tolerance="none: the figure could not be checked",
        verdict=decide(use, False),
        why="a ring of 16 at the link's line rate; only the latency keeps messages from using all of it, so this is "
        "the most that they could",
        how="bytes at the link's bandwidth over the time of one ring all-reduce a layer, 54 layers, 100gb-ib",
        data="data/derived/simulator/link_use.csv",
    ),
]
write_claims(folder / "derived/claims/simulator.json", claims)
ledger = pd.DataFrame([item.model_dump() for item in claims])
display(ledger[["claim", "published", "ours", "unit", "kind", "verdict"]].set_index("claim").round(3))
