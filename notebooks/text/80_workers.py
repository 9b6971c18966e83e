# %% [markdown]
# # How do schedules scale when many workers really send their gradients?
#
# Workers of one machine, each behind a link of its own of a given rate, train in step. In place of computing each waits
# as long as the layers of a recorded profile took; gradients of the right size really travel through the engine, are
# averaged, and every step waits for them: **emulated compute, real communication**. A lone worker's step is the
# profile. The batch of a worker stays the same, so that the speed-up on N workers is N t(1) / t(N). The engine here is
# torch.distributed over gloo, which runs every schedule; the frameworks' own are two pages on.
#
# A cell whose workers could together ask for more than a third of what the machine moves between namespaces is marked
# *bound by the processors*, and no verdict rests on it.

# %% tags=["parameters"]
out: str = ""
timeline_workers: int = 4

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core import statistics
from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.files import project_root, write_table
from steptime.core.step import Task, Timeline
from steptime.core.workers import WorkersCampaign, read_workers, workers_folders
from steptime.model import worker_cells, worker_steps
from steptime.notebook import out_folder
from steptime.report import figures, panels, simulations, style

root = project_root()
folder = out_folder(out, "workers")
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


def rate_text(bits: float) -> str:
    """A rate as it is spoken of."""
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def place_of(row: pd.Series) -> str:
    """Network, what its layers' times are from, and link."""
    link = "loopback" if pd.isna(row["rate_bits_per_s"]) else rate_text(row["rate_bits_per_s"])
    return f"{row['network']}, {link}"


tables = [worker_cells.cell_table(found) for found in campaigns.values()]
cells = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=worker_cells.COLUMNS)
cells = cells[cells["engine"] == worker_cells.GLOO].reset_index(drop=True)
cells["name"] = cells["schedule"].map(worker_cells.name_of)
cells["place"] = [place_of(row) for _, row in cells.iterrows()]
many = cells[cells["workers"] > 1]
save(cells.drop(columns=["name", "place"]), "cells")
for name, found in campaigns.items():
    own = cells[cells["campaign"] == name]
    if own.empty:
        continue
    runs = found.campaign.runs[found.campaign.runs["case_id"].str.startswith(worker_cells.GLOO)]
    finished, bound = int((runs["status"] == "finished").sum()), int(own["is_cpu_bound"].sum())
    told = {column: ", ".join(sorted(set(own[column]))) for column in ("network", "profile", "engine", "compute")}
    display(
        Markdown(
            f"**{name}**: {told['network']} by the profile *{told['profile']}*, engine {told['engine']}; {len(own)} "
            f"cells, {finished} of {len(runs)} runs finished, {bound} cells bound by the processors; {told['compute']}."
        )
    )

# %% [markdown]
# ## Speed-up
#
# The band is the 95 % interval over runs, each of freshly started workers. The step of a lone worker is the network's,
# whatever the link. Samples a second, not what is learnt from them: sparse chunks and local SGD also train differently.

# %%
drawn = many.rename(columns={"speed_up_lo": "lo", "speed_up_hi": "hi"}).assign(kind="emulated")
if len(drawn):
    figure = figures.speed_up(drawn, "name", "place", "Speed-up over one worker, emulated compute, real communication")
    style.save(figure, folder / "figures/speed-up.svg")
    display(figure)
    shown = many.assign(**{"step, ms": 1e3 * many["median_s"]}).pivot_table(
        index=["place", "name"], columns="workers", values="step, ms"
    )
    display(shown.round(1))

# %% [markdown]
# ## Exposed communication
#
# Where the step goes on the most workers. What is not hidden behind the backward pass is exposed.

# %%
PARTS = {"forward": "forward_s", "backward": "backward_s", "communicate": "exposed_s", "update": "update_s"}
largest = many[many["workers"] == many.groupby("campaign")["workers"].transform("max")]
parts = [
    largest.assign(part=part, time_s=largest[column])[["place", "name", "workers", "part", "time_s"]]
    for part, column in PARTS.items()
]
exposed = pd.concat(parts, ignore_index=True)
counts = " or ".join(map(str, sorted(set(largest["workers"]))))
save(exposed, "exposed")
if len(exposed):
    figure = panels.stacked(
        exposed.rename(columns={"place": "network"}).assign(
            setting=exposed["name"].map(lambda name: figures.SCHEDULE_LABELS.get(name, name))
        ),
        panels.PHASE_COLOURS,
        f"Where a step of {counts} workers goes (emulated compute, real communication)",
        note="not measured",
    )
    style.save(figure, folder / "figures/exposed.svg")
    display(figure)

# %% [markdown]
# ## Bytes on the wire
#
# What the busiest worker's interface sent in a step, counted there, over the closed form of its schedule. The rest is
# headers of Ethernet, IP and TCP and the acknowledgements of what came.

# %%
counted = many[many["sent_bytes"].notna()]
over = (
    (counted["sent_bytes"] / counted["expected_bytes"] - 1)
    .groupby([counted["place"], counted["name"]])
    .agg(["min", "max"])
    .reset_index()
)
save(over, "bytes")
if len(over):
    worst = over.loc[over["max"].idxmax()]
    label = figures.SCHEDULE_LABELS.get(worst["name"], worst["name"])
    display(
        Markdown(
            f"Over {len(counted)} cells the interface sent {over['min'].min():+.1%} to {over['max'].max():+.1%} beside "
            f"the closed form; the most for {label} on {worst['place']}."
        )
    )

# %% [markdown]
# ## One step, measured beside simulated
#
# Worker 0 in the last step of the first run, and the same schedule as the model has it, fitted on at most two workers
# (the page on predictions says how). DDP's own buckets report no times of their messages: only the device is seen. To
# servers only the handing over of the pushes is recorded; the replies come until the step ends.

# %%
TASKS = {"forward": "forward", "backward": "backward", "exchange": "communicate", "update": "update"}
_, fits = worker_cells.predictions(list(campaigns.values()))


def measured_line(found: WorkersCampaign, case_id: str) -> Timeline:
    """The recorded step of worker 0."""
    rows = found.timelines[found.timelines["run_id"].str.startswith(f"{case_id}-r") & (found.timelines["worker"] == 0)]
    return Timeline(
        "emulated",
        tuple(
            Task(row.task, row.resource, 0, row.start_s, row.end_s, TASKS[row.task], row.layer or "")
            for row in rows.itertuples()
        ),
    )


for number, (name, found) in enumerate(campaigns.items()):
    own = cells[(cells["campaign"] == name) & (cells["workers"] == timeline_workers)]
    own = own[own["name"].isin(worker_steps.PREDICTED) & own["rate_bits_per_s"].notna()]
    own = own[~own["is_cpu_bound"].astype(bool)]
    own = own[own["place"] == own["place"].iloc[0]] if len(own) else own
    fit = fits.get(worker_cells.fit_key(worker_cells.GLOO, found.campaign.runs))
    if own.empty or found.profile is None or fit is None:
        continue
    replayed = worker_cells.replayed_of(found, cells[cells["campaign"] == name])
    lines: dict[str, Timeline] = {}
    for _, row in own.iterrows():
        label = figures.SCHEDULE_LABELS.get(row["name"], row["name"])
        lines[f"{label}, emulated"] = measured_line(found, row["case_id"])
        cell = worker_cells.cell_of(row, found.profile)
        lines[f"{label}, simulated"] = worker_steps.predict(replayed, cell, fit.host).timeline
    title = f"{own['place'].iloc[0]}, {timeline_workers} workers"
    figure = simulations.timelines(lines, f"One step, emulated compute beside simulated: {title}")
    style.save(figure, folder / f"figures/timeline-{number}.svg")
    display(figure)

# %% [markdown]
# ## Does merging pay?
#
# The merged schedule's messages were planned by the model before it was measured, once for each network and link, for
# four workers, from what an all-reduce of two workers costs there. Compared round by round with the other two; an
# interval at 99 % that leaves out 1 is a difference.

# %%
rows = []
for (name, place), part in many.groupby(["campaign", "place"], sort=False):
    usable = statistics.usable(campaigns[name].campaign.joined())
    for workers, own in part.groupby("workers"):
        by_name = own.drop_duplicates("name").set_index("name")["case_id"]
        if not {"merged", "end_of_backward"} <= set(by_name.index):
            continue
        for other in ("end_of_backward", "wait_free"):
            if other not in by_name.index:
                continue
            of = [usable[usable["case_id"] == by_name[each]] for each in ("merged", other)]
            found = statistics.compare(*of)
            bound = bool(own["is_cpu_bound"].any())
            rows.append((name, place, workers, other, found.ratio, found.lo, found.hi, found.different, bound))
MERGED = ["campaign", "place", "workers", "against", "ratio", "lo", "hi", "is_different", "is_cpu_bound"]
merged = pd.DataFrame(rows, columns=MERGED)
save(merged, "merged")
judged = merged[~merged["is_cpu_bound"].astype(bool)]
if len(judged):
    both = judged.groupby(["place", "workers"])
    wins = both.filter(lambda part: len(part) == 2 and (part["is_different"] & (part["ratio"] < 1)).all())
    worse = judged[judged["is_different"] & (judged["ratio"] > 1.03)]
    where = "; ".join(f"{place} on {workers}" for place, workers in wins.groupby(["place", "workers"]).groups)
    slower = [f"{row.place} on {row.workers}, {row.ratio:.2f} of {row.against}" for row in worse.itertuples()]
    display(
        Markdown(
            f"Merged is significantly faster than both others on: {where or 'no cell'}. It is significantly slower "
            f"than one of them by more than 3 % in {len(worse)} of {len(judged)} comparisons"
            + (f": {'; '.join(slower)}." if slower else ".")
        )
    )
    display(judged.drop(columns=["campaign", "is_cpu_bound"]).set_index(["place", "workers", "against"]).round(3))

# %% [markdown]
# ## Claims

# %%
papers_at = root / "data/published"
claims = []
order = read_paper(papers_at / "mg-wfbp-2018.yaml").figure("merge-order")
calm = many[~many["is_cpu_bound"].astype(bool)]
wide = calm.pivot_table(index=["place", "workers"], columns="name", values="speed_up")
three = [name for name in ("merged", "wait_free", "end_of_backward") if name in wide.columns]
eight = None
if len(three) == 3 and 8 in wide.index.get_level_values("workers"):
    eight = wide.xs(8, level="workers")[three].dropna()
if eight is not None and len(eight):
    in_order = (eight["merged"] > eight["wait_free"]) & (eight["wait_free"] > eight["end_of_backward"])
    first = eight["merged"] > eight[["wait_free", "end_of_backward"]].max(axis=1)
    said = "; ".join(f"{place}: {', '.join(f'{n} {v:.2f}' for n, v in row.items())}" for place, row in eight.iterrows())
    claims.append(
        Claim(
            id="merge-order-emulated",
            paper="mg-wfbp-2018",
            figure=order.id,
            claim=f"{order.text}; here: share of networks and links with merged first",
            published=order.value,
            unit="%",
            ours=100 * float(first.mean()),
            kind="emulated",
            tolerance="holds: in the published order on every network and link; in shape: merged first on every one",
            verdict=decide(order, bool(in_order.all()), in_shape=bool(first.all())),
            why=said,
            how="torch.distributed over gloo, 8 workers on shaped links, emulated compute, real communication",
            data="data/derived/workers/cells.csv",
        )
    )
tree = read_paper(papers_at / "firecaffe-2015.yaml").figure("tree-over-server")
if {"ps_central", "wait_free"} <= set(wide.columns):
    both = wide[["ps_central", "wait_free", *[n for n in ("merged",) if n in wide.columns]]].dropna(subset="ps_central")
    ring = both.drop(columns="ps_central").max(axis=1)
    gain = (ring / both["ps_central"]).rename("gain")
    rises = gain.groupby(level="place").apply(lambda part: part.is_monotonic_increasing)
    if len(gain):
        claims.append(
            Claim(
                id="ring-over-server-emulated",
                paper="firecaffe-2015",
                figure=tree.id,
                claim=f"{tree.text}: speed-up of rings over that of one server on the most workers",
                published=tree.value,
                unit="times",
                ours=float(gain.iloc[-1]),
                kind="emulated",
                tolerance="holds: above 1 for every number of workers and rising with it",
                verdict=decide(tree, bool((gain > 1).all() and rises.all())),
                why="; ".join(f"{place}, {workers} workers: {value:.2f}" for (place, workers), value in gain.items()),
                how="a ring in place of a tree, the better of wait-free and merged; one server with a node of its own; "
                "emulated compute, real communication",
                data="data/derived/workers/cells.csv",
            )
        )
write_claims(folder / "derived/claims/workers.json", claims)
if claims:
    ledger = pd.DataFrame([item.model_dump() for item in claims])
    display(ledger[["claim", "ours", "unit", "kind", "verdict"]].set_index("claim").round(3))
else:
    display(Markdown("No claim can be held against measurements yet."))
