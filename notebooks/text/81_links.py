# %% [markdown]
# # Where does each schedule stop scaling, and which is best on which link?
#
# The same measurements as on the page before, *emulated compute, real communication*, by the rate of the workers'
# links, from 250 Mbit/s to 10 Gbit/s and the loopback interface, as far as they were measured; then the model, with
# what it fitted on at most two workers, over rates that were not measured: every worker on a machine of its own, so
# that no rank queues for a core.

# %% tags=["parameters"]
out: str = ""
workers: list[int] = [4, 8]
lowest_gbit: float = 0.1
highest_gbit: float = 10.0

# %%
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.files import project_root, write_table
from steptime.core.machine import burst_bytes
from steptime.core.workers import read_workers, workers_folders
from steptime.model import merging, worker_cells
from steptime.model.collectives import AllReduce
from steptime.model.step import sending_order
from steptime.model.worker_steps import Cell, Host, Replayed, ShapedLink, predict
from steptime.notebook import out_folder
from steptime.report import curves, style
from steptime.report.figures import SCHEDULE_LABELS

root = project_root()
folder = out_folder(out, "links")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)
campaigns = {name: read_workers(path) for name, path in workers_folders(root).items()}
if not campaigns:
    display(
        Markdown(
            "**No campaign of many workers is recorded yet**, so this page has no figure: `steptime workers run` "
            "measures one, `steptime campaign add` makes it part of the study."
        )
    )


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


tables = [worker_cells.cell_table(found) for found in campaigns.values()]
cells = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=worker_cells.COLUMNS)
cells = cells[cells["engine"] == worker_cells.GLOO].reset_index(drop=True)
cells["name"] = cells["schedule"].map(worker_cells.name_of)
shaped = cells[cells["rate_bits_per_s"].notna()]

# %% [markdown]
# ## The links themselves
#
# Measured by messages there and back between two of the namespaces, before each round: the latency of the smallest, the
# rate by two large ones; and the rate of the same link before it was held back.

# %%
LINKS = ["campaign", "asked_gbit", "measured_gbit", "latency_us", "machine_gbit", "most_workers"]
rows = []
for (campaign, rate), part in shaped.groupby(["campaign", "rate_bits_per_s"], sort=False):
    machine = 8e-9 / float(part["unshaped_beta_s_per_byte"].median())
    measured = 8e-9 / float(part["beta_s_per_byte"].median())
    most = int(machine / 3 / (rate / 1e9))
    rows.append((campaign, rate / 1e9, measured, 1e6 * float(part["alpha_s"].median()), machine, most))
links = pd.DataFrame(rows, columns=LINKS)
save(links, "links")
if len(links):
    off = (links["measured_gbit"] / links["asked_gbit"] - 1).abs().max()
    display(
        Markdown(
            f"The measured rates are within {off:.0%} of those asked for (headers take 4 %). `most_workers` is how "
            "many could send at once before they took a third of what the machine moves; cells beyond are bound by "
            "the processors."
        )
    )
    display(links.set_index(["campaign", "asked_gbit"]).round(2))

# %% [markdown]
# ## Where scaling stops
#
# A doubling of the workers that brings at least 1.5 times the samples a second pays. `pays_to` is the number of workers
# up to which every measured doubling paid; 1: not even the first. A row `is_cpu_bound` where a cell of it is: there the
# two cores decide, and the number is this machine's, not the link's.

# %%
PAYS = 1.5
rows = []
for (campaign, network, rate, name), part in shaped.groupby(
    ["campaign", "network", "rate_bits_per_s", "name"], sort=False
):
    part = part.sort_values("workers")
    gains = [(1, 1.0), *zip(part["workers"], part["speed_up"], strict=True)]
    pays_to = 1
    for (few, before), (more, after) in pairwise(gains):
        if not after / before >= PAYS ** np.log2(more / few):
            break
        pays_to = int(more)
    last = part.iloc[-1]
    bound = bool(part["is_cpu_bound"].any())
    rows.append((campaign, network, rate / 1e9, name, pays_to, int(last["workers"]), last["speed_up"], bound))
SCALING = ["campaign", "network", "gbit", "schedule", "pays_to", "most_measured", "speed_up_there", "is_cpu_bound"]
scaling = pd.DataFrame(rows, columns=SCALING)
save(scaling, "scaling")
if len(scaling):
    display(scaling.set_index(["network", "gbit", "schedule"]).drop(columns="campaign").round(2))

# %% [markdown]
# ## Ring, servers or factors, where they were measured
#
# The fastest step of each kind: a ring (after backward, wait-free, merged, buckets), parameter servers (one, sharded),
# and sufficient factors. `next_ratio`: how much longer the next kind takes. An empty rate is the loopback interface,
# which nothing holds back; that, and what else is bound by the processors, tells nothing of links.

# %%
KINDS = {
    **dict.fromkeys(("end_of_backward", "wait_free", "merged", "buckets", "lazy"), "ring_s"),
    **dict.fromkeys(("ps_central", "ps_sharded"), "servers_s"),
    "sufficient_factors": "factors_s",
}
many = cells[(cells["workers"] > 1) & cells["name"].isin(KINDS)].assign(of=cells["name"].map(KINDS))
many["gbit"] = many["rate_bits_per_s"].astype(float) / 1e9
TIMES = ["ring_s", "servers_s", "factors_s"]
rows = []
for (campaign, network, gbit, count), part in many.groupby(
    ["campaign", "network", "gbit", "workers"], sort=True, dropna=False
):
    times = part.groupby("of")["median_s"].min()
    if len(times) < 2:
        continue
    ordered = times.sort_values()
    each = [float(times.get(kind, np.nan)) for kind in TIMES]
    ratio = float(ordered.iloc[1] / ordered.iloc[0])
    rows.append((campaign, network, gbit, count, *each, ordered.index[0][:-2], ratio, bool(part["is_cpu_bound"].any())))
KINDS_TABLE = ["campaign", "network", "gbit", "workers", *TIMES, "fastest", "next_ratio", "is_cpu_bound"]
kinds = pd.DataFrame(rows, columns=KINDS_TABLE)
save(kinds, "kinds")
if len(kinds):
    display(kinds.drop(columns="campaign").set_index(["network", "gbit", "workers"]).round(3))

# %% [markdown]
# ## Rates that were not measured
#
# Speed-up over the rate of the links, simulated, with the measured cells beside it as filled marks. Measured cells
# share two cores among all ranks and lie below the curve where those are what they wait for. The merged schedule is
# planned anew for every rate.

# %%
_, fits = worker_cells.predictions(list(campaigns.values()))
rates = np.geomspace(lowest_gbit, highest_gbit, 25)
SIMULATED = ("end_of_backward", "wait_free", "merged", "ps_central", "ps_sharded", "sufficient_factors")


def cell_for(name: str, count: int, gbit: float, like: pd.Series, replayed: Replayed, host: Host) -> Cell:
    """A schedule on a link of another rate than that of `like`, with its latency."""
    ready_s, n_bytes, _ = sending_order(replayed.profile)
    beta = like["beta_s_per_byte"] * like["rate_bits_per_s"] / (1e9 * gbit)
    ends = merging.layer_wise(len(n_bytes))
    if name == "end_of_backward":
        ends = merging.one_message(len(n_bytes))
    if name == "merged":
        ring = AllReduce(2 * (count - 1) * (like["alpha_s"] + host.round_s), 2 * (count - 1) / count * beta)
        ends = merging.optimal_groups(ready_s, n_bytes, ring)
    burst = burst_bytes(1e9 * gbit)
    cell = worker_cells.cell_of(like.copy().where(like.index != "schedule", name), replayed.profile)
    return replace(cell, workers=count, ends=ends, link=ShapedLink(float(like["alpha_s"]), float(beta), burst))


rows = []
seen = set()
for name, found in campaigns.items():
    own = shaped[shaped["campaign"] == name]
    # one profile, measured on several links, is one sweep
    if set(own["profile"]) <= seen:
        continue
    seen |= set(own["profile"])
    key = worker_cells.fit_key(worker_cells.GLOO, found.campaign.runs)
    if key not in fits or found.profile is None:
        continue
    replayed = worker_cells.replayed_of(found, cells[cells["campaign"] == name])
    like = own.iloc[0]
    lone_s = predict(replayed, Cell("end_of_backward", 1, (), None), fits[key].host).step_s
    for count in workers:
        host = replace(fits[key].host, cores=2 * count)
        for schedule in SIMULATED:
            for gbit in rates:
                step = predict(replayed, cell_for(schedule, count, gbit, like, replayed, host), host)
                speed_up = count * lone_s / step.step_s
                rows.append((name, like["network"], like["profile"], count, schedule, gbit, step.step_s, speed_up))
SWEEP = ["campaign", "network", "profile", "workers", "schedule", "gbit", "step_s", "speed_up"]
sweep = pd.DataFrame(rows, columns=SWEEP)
save(sweep, "sweep")
most = sweep[sweep["workers"] == sweep["workers"].max()]
for number, ((profile, count), part) in enumerate(most.groupby(["profile", "workers"], sort=False)):
    beside = shaped[(shaped["profile"] == profile) & (shaped["workers"] == count) & shaped["name"].isin(SIMULATED)]
    drawn = pd.concat(
        [
            part.assign(x=part["gbit"], y=part["speed_up"], series=part["schedule"], kind="simulated"),
            beside.assign(
                x=beside["rate_bits_per_s"] / 1e9, y=beside["speed_up"], series=beside["name"], kind="emulated"
            ),
        ]
    )
    drawn["series"] = drawn["series"].map(lambda each: SCHEDULE_LABELS.get(each, each))
    figure = curves.curves(
        drawn[["x", "y", "series", "kind"]],
        f"Speed-up on {count} workers by the rate of their links: {part['network'].iloc[0]}",
        ("rate of a link, Gbit/s", "speed-up"),
    )
    style.save(figure, folder / f"figures/sweep-{number}.svg")
    display(figure)

# %% [markdown]
# ## Crossovers
#
# The rates between which another schedule becomes the fastest, simulated; two within 1 % of each other are not told
# apart, the simpler one standing first: after backward, wait-free, merged, servers, factors.

# %%
rows = []
for (name, network, count), part in sweep.groupby(["campaign", "network", "workers"], sort=False):
    wide = part.pivot_table(index="gbit", columns="schedule", values="step_s")[list(SIMULATED)]
    best = (wide.le(1.01 * wide.min(axis=1), axis=0)).idxmax(axis=1)
    starts = best[best != best.shift()]
    ends = [*starts.index[1:], wide.index[-1]]
    rows += [
        (name, network, count, which, first, last) for (first, which), last in zip(starts.items(), ends, strict=True)
    ]
best = pd.DataFrame(rows, columns=["campaign", "network", "workers", "fastest", "from_gbit", "to_gbit"])
save(best, "crossovers")
if len(best):
    display(best.drop(columns="campaign").set_index(["network", "workers"]).round(2))
