# %% [markdown]
# # Do the findings about Caffe-MPI, CNTK, MXNet and TensorFlow hold today?
#
# The primary study compared four frameworks on several nodes and explained what it saw by what each does with its
# gradients. Here the engines that these frameworks have today, or had last, are really started, each with its own
# processes, and send gradients of the right size over links of a given rate; each worker waits as long as the layers of
# one recorded profile took: *emulated compute, real communication*. So all engines have the same arithmetic, and only
# their schedules and their transport differ. ChainerMN and torch.distributed stand beside them.
#
# "Caffe" is Caffe 1.0 with an all-reduce of OpenMPI, layer by layer on a thread: Caffe-MPI's own code was not at hand.
# TensorFlow's is MultiWorkerMirroredStrategy, which has taken the place of parameter servers for synchronous training.
# What waits is no device: data layout, kernels and the input are not asked about here.

# %% tags=["parameters"]
out: str = ""

# %%
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, Verdict, decide, read_paper, write_claims
from steptime.core.files import project_root, write_table
from steptime.core.machine import burst_bytes
from steptime.core.workers import read_workers, workers_folders
from steptime.model import worker_cells, worker_engines, worker_steps
from steptime.notebook import out_folder
from steptime.report import curves, figures, style

root = project_root()
folder = out_folder(out, "frameworks")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)
every = {name: read_workers(path) for name, path in workers_folders(root).items()}
campaigns = {name: each for name, each in every.items() if set(each.workers["engine"]) - {worker_cells.GLOO}}
if not campaigns:
    display(
        Markdown(
            "**No campaign of the frameworks' own engines is recorded yet**, so this page has no figure: `steptime "
            "workers run --engine` measures one, `steptime campaign add` makes it part of the study."
        )
    )


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def compute_s(name: str) -> float:
    """What a worker of the campaign waits through."""
    profile = campaigns[name].profile
    return 0.0 if profile is None else profile.t_f_s + profile.t_b_s


tables = [worker_cells.cell_table(each) for each in campaigns.values()]
cells = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=worker_cells.COLUMNS)
cells["key"] = [worker_engines.key_of(row) for _, row in cells.iterrows()]
cells["name"] = cells["key"].map(worker_engines.name_of)
gbit = (cells["rate_bits_per_s"].astype(float) / 1e9).map("{:g} Gbit/s".format)
cells["place"] = cells["network"].astype(str) + ", " + gbit
longest = {network: max(part["campaign"].unique(), key=compute_s) for network, part in cells.groupby("network")}
is_full = cells["campaign"].isin(longest.values())
many = cells[is_full & (cells["workers"] > 1)]
save(cells.drop(columns=["key", "name", "place"]), "cells")
for name, each in campaigns.items():
    runs = each.campaign.runs
    failed = runs[runs["status"] != "finished"]
    own = cells[cells["campaign"] == name]
    display(
        Markdown(
            f"**{name}**: {own['network'].iloc[0]}, {1e3 * compute_s(name):.3g} ms of forward and backward by the "
            f"profile *{own['profile'].iloc[0]}*; {len(own)} cells of {own['engine'].nunique()} engines, "
            f"{len(runs) - len(failed)} of {len(runs)} runs finished, {int(own['is_cpu_bound'].sum())} cells bound by "
            f"the processors; {', '.join(sorted(set(own['compute'])))}."
        )
    )

# %% [markdown]
# ## How each scales
#
# The four frameworks as their engines are by default, on the longer profile of each network; then all schedules.
# `link_share`: what the busiest interface sent (a worker's, or a server's, which answers all workers), over what the
# link could have carried in what the step grew by. Where that is more than all, some was sent behind backward:
# `hidden_least` is what must have been, in the share of backward's time, since a link carries no more than its rate and
# what may leave at once after a pause. An engine that uses the link badly may hide more than that shows.

# %%
usual = many[many["key"].isin(worker_engines.USUAL)]
if len(usual):
    figure = figures.speed_up(
        usual.rename(columns={"speed_up_lo": "lo", "speed_up_hi": "hi"}).assign(kind="emulated"),
        "name",
        "place",
        "Speed-up of four frameworks, emulated compute, real communication",
    )
    style.save(figure, folder / "figures/speed-up.svg")
    display(figure)
rows = []
for _, row in many.iterrows():
    own = cells[(cells["campaign"] == row["campaign"]) & (cells["engine"] == row["engine"])]
    alone = own[own["workers"] == 1]
    if alone.empty:
        continue
    added_s = float(row["median_s"] - alone["median_s"].iloc[0])
    sent = worker_engines.busiest_bytes(row)
    share = sent * row["beta_s_per_byte"] / added_s if added_s > 0 else np.nan
    burst = burst_bytes(float(row["rate_bits_per_s"])) if pd.notna(row["rate_bits_per_s"]) else np.nan
    least_s = (sent - burst) * row["beta_s_per_byte"] - max(0.0, float(row["hi_s"] - alone["median_s"].iloc[0]))
    least = max(0.0, least_s) / campaigns[row["campaign"]].profile.t_b_s
    said = worker_engines.DESCRIBED.get(row["key"], ("", "", ""))[1]
    times = (float(row["median_s"]), float(row["lo_s"]), float(row["hi_s"]), added_s)
    bound = bool(row["is_cpu_bound"])
    found = (row["place"], row["key"], row["name"], said, row["workers"], *times, row["speed_up"], sent, share)
    rows.append((*found, least, bound))
SCALING = [
    *("place", "key", "name", "aggregates", "workers", "step_s", "lo_s", "hi_s", "added_s", "speed_up"),
    *("busiest_bytes", "link_share", "hidden_least", "is_cpu_bound"),
]
scaling = pd.DataFrame(rows, columns=SCALING)
save(scaling, "scaling")
if len(scaling):
    shown = scaling.assign(**{"step, ms": 1e3 * scaling["step_s"], "sent, MB": scaling["busiest_bytes"] / 1e6})
    columns = ["step, ms", "speed_up", "sent, MB", "link_share", "hidden_least", "is_cpu_bound"]
    display(shown.set_index(["place", "name", "workers"])[columns].round(2))
    display(Markdown("; ".join(f"{worker_engines.name_of(k)}: {v[1]}" for k, v in worker_engines.DESCRIBED.items())))

# %% [markdown]
# ## Who hides communication behind backward
#
# Where a network was replayed with a shorter profile, too: what the short step grows by is the communication with next
# to nothing to hide behind, what the full one grows by less was hidden. The share is of what could be hidden, the
# shorter of communication and backward; the line is the 95 % interval. An engine that waits for backward hides nothing;
# below nothing, the workers of the full profile also lost time by waiting for each other.

# %%
rows = []
for network, full in longest.items():
    for short in [name for name in campaigns if name != full and (cells["campaign"] == name).any()]:
        part = cells[(cells["network"] == network) & (cells["campaign"] == short)]
        for _, row in part[part["workers"] > 1].iterrows():
            of_full = cells[(cells["campaign"] == full) & (cells["engine"] == row["engine"])]
            of_short = part[part["engine"] == row["engine"]]
            same = of_full[
                (of_full["schedule"] == row["schedule"])
                & (of_full["workers"] == row["workers"])
                & (of_full["rate_bits_per_s"] == row["rate_bits_per_s"])
            ]
            lone = [of[of["workers"] == 1] for of in (of_full, of_short)]
            if same.empty or lone[0].empty or lone[1].empty:
                continue
            found = worker_engines.hidden(same.iloc[0], lone[0].iloc[0], row, lone[1].iloc[0])
            profile = campaigns[full].profile
            most_s = min(found.communication_s, profile.t_b_s)
            shares = (found.share(profile.t_b_s), found.lo_s / most_s, found.hi_s / most_s)
            busy = worker_engines.busiest_bytes(row) * row["beta_s_per_byte"] / found.communication_s
            ups = (float(same["speed_up"].iloc[0]), float(row["speed_up"]))
            bound = bool(row["is_cpu_bound"] or same["is_cpu_bound"].iloc[0])
            each = (found.communication_s, found.exposed_s, *shares, busy, *ups, bound)
            rows.append((row["place"], row["key"], row["name"], row["workers"], *each))
HIDDEN = [
    *("place", "key", "name", "workers", "communication_s", "exposed_s", "share", "lo", "hi", "link_share"),
    *("speed_up", "speed_up_short", "is_cpu_bound"),
]
hidden = pd.DataFrame(rows, columns=HIDDEN)
save(hidden, "hidden")
if len(hidden):
    bound = int(hidden["is_cpu_bound"].sum())
    display(
        Markdown(f"{bound} of {len(hidden)} pairs are bound by the processors: shown, and no verdict rests on them.")
    )
    drawn = hidden.assign(
        row=hidden["name"],
        series=hidden["place"] + ", " + hidden["workers"].astype(str) + " workers",
        kind="emulated",
        x=(100 * hidden["share"]).clip(-100, 200),
        lo=(100 * hidden["lo"]).clip(-100, 200),
        hi=(100 * hidden["hi"]).clip(-100, 200),
    )
    figure = curves.points(
        drawn,
        "Communication hidden behind backward (emulated compute, real communication)",
        "% of what could be hidden\n(line: 95 % interval; cut at -100 and 200)",
        band=(0.0, 100.0),
    )
    style.save(figure, folder / "figures/hidden.svg")
    display(figure)
    shown = hidden.drop(columns=["key", "is_cpu_bound"])
    for column in ("communication_s", "exposed_s"):
        shown[column.replace("_s", ", ms")] = 1e3 * shown.pop(column)
    display(shown.set_index(["place", "name", "workers"]).round(2))

# %% [markdown]
# ## Does the schedule explain the order?
#
# The same profile and link under the schedule that each framework's engine is nearest to, predicted with the numbers
# that torch.distributed's steps on two workers gave on the same machine (the page before): wait-free for Caffe, after
# backward for CNTK and TensorFlow, one server for MXNet. If schedules explain how frameworks scale, the order is right;
# what the transport costs on top shows in the ratio.

# %%
_, fits = worker_cells.predictions(list(every.values()))
rows = []
for _, row in usual.iterrows():
    profile = campaigns[row["campaign"]].profile
    fit = fits.get(worker_cells.fit_key(worker_cells.GLOO, campaigns[row["campaign"]].campaign.runs))
    if fit is None or profile is None:
        continue
    host = fit.host
    nearest = worker_engines.DESCRIBED[row["key"]][2]
    cell = worker_cells.cell_of(row.where(row.index != "schedule", nearest), profile)
    layers = int((profile.parameter_bytes > 0).sum())
    ends = (layers,) if nearest == "end_of_backward" else tuple(range(1, layers + 1))
    told = worker_steps.Cell(nearest, cell.workers, ends, cell.link)
    replayed = worker_steps.Replayed(profile)
    predicted_s = worker_steps.predict(replayed, told, host).step_s
    lone_s = worker_steps.predict(replayed, worker_steps.Cell(nearest, 1, (), None), host).step_s
    speed_up = row["workers"] * lone_s / predicted_s
    found = (row["place"], row["key"], row["name"], row["workers"], nearest, predicted_s, row["median_s"])
    rows.append((*found, speed_up, row["speed_up"], bool(row["is_cpu_bound"])))
ORDER = [
    *("place", "key", "name", "workers", "schedule", "predicted_s", "measured_s", "predicted_speed_up"),
    *("measured_speed_up", "is_cpu_bound"),
]
order = pd.DataFrame(rows, columns=ORDER)
save(order, "order")
agreeing, told_apart = 0, 0
for _, part in order[~order["is_cpu_bound"].astype(bool)].groupby(["place", "workers"]):
    by = part.set_index("key")
    right, pairs = worker_engines.pairs_in_order(dict(by["predicted_speed_up"]), dict(by["measured_speed_up"]))
    agreeing, told_apart = agreeing + right, told_apart + pairs
if len(order):
    display(
        Markdown(
            f"Of {told_apart} pairs of frameworks that the schedules tell apart, {agreeing} stand in that order on the "
            "real engines."
        )
    )
    shown = order.assign(**{"measured / predicted": order["measured_s"] / order["predicted_s"]})
    columns = ["schedule", "predicted_speed_up", "measured_speed_up", "measured / predicted"]
    display(shown.set_index(["place", "name", "workers"])[columns].round(2))

# %% [markdown]
# ## Claims
#
# Most of what the study said of its frameworks is recalled, not checked: it decides nothing, and what was found stands
# beside it with `found` saying whether it is so here.

# %%
paper = read_paper(root / "data/published/ssgd-2017.yaml")
guolinke = read_paper(root / "data/published/guolinke-2016.yaml")
claims: list[Claim] = []
findings: list[tuple[str, str]] = []
DATA = "data/derived/frameworks"
HOW = "the frameworks' own engines on shaped links, emulated compute, real communication"
calm = hidden[~hidden["is_cpu_bound"].astype(bool)].set_index("key")
calm_scaling = scaling[~scaling["is_cpu_bound"].astype(bool)]


def add(name: str, of: str, holds: bool, ours: float | None, unit: str, tolerance: str, why: str, data: str) -> None:
    """A claim about a figure of the primary study, whose text is the claim."""
    figure = paper.figure(of)
    verdict: Verdict = decide(figure, holds)
    findings.append((figure.text, "so here" if holds else "not so here"))
    claims.append(
        Claim(
            id=name,
            paper=paper.id,
            figure=figure.id,
            claim=figure.text,
            published=figure.value,
            unit=unit,
            ours=ours,
            kind="emulated",
            tolerance=tolerance,
            verdict=verdict,
            why=f"{'so here' if holds else 'not so here'}: {why}",
            how=HOW,
            data=f"{DATA}/{data}.csv",
        )
    )


for name, of, key, overlaps in (
    ("cntk-no-overlap-emulated", "cntk-no-overlap", "cntk_mpi/bits=32", False),
    ("caffe-overlap-emulated", "caffe-mpi-overlap", "caffe_mpi/wait_free", True),
    ("mxnet-overlap-emulated", "mxnet-overlap", "mxnet_kvstore/dist_sync=1", True),
):
    part = calm_scaling[calm_scaling["key"] == key]
    if len(part):
        does = bool((part["hidden_least"] > 0).any())
        said = "; ".join(
            f"{row.place}, {row.workers} workers: at least {row.hidden_least:.0%} of backward's time"
            for row in part.itertuples()
        )
        tolerance = (
            "so if on one network, at the upper end of the step's interval, some must have been sent behind backward"
            if overlaps
            else "so if on no network any must have been; that nothing was is not proved by this"
        )
        add(name, of, does == overlaps, 100 * float(part["hidden_least"].max()), "%", tolerance, said, "scaling")
if len(calm_scaling):
    rings = {
        "tensorflow_multiworker/pack=0": "torch_gloo/end_of_backward",
        "tensorflow_multiworker/pack=1048576": "torch_gloo/lazy=1048576",
    }
    wide = calm_scaling.pivot_table(index=["place", "workers"], columns="key", values="step_s")
    ratios = {
        (place, workers, key): wide.loc[(place, workers), key] / wide.loc[(place, workers), other]
        for key, other in rings.items()
        if {key, other} <= set(wide.columns)
        for place, workers in wide[[key, other]].dropna().index
    }
    if ratios:
        said = "; ".join(f"{p}, {w} workers, {worker_engines.name_of(k)}: {v:.2f}" for (p, w, k), v in ratios.items())
        add(
            "tensorflow-grpc-emulated",
            "tensorflow-grpc",
            float(np.median(list(ratios.values()))) > 1.05,
            float(np.median(list(ratios.values()))),
            "times",
            "so if the median step is more than 5 % longer than with the same ring and messages over gloo's sockets",
            f"step over that of torch.distributed: {said}",
            "scaling",
        )
if told_apart:
    add(
        "schedules-order-emulated",
        "schedules-explain-scaling",
        agreeing / told_apart >= 0.8,
        100 * agreeing / told_apart,
        "%",
        "so if four of five pairs of frameworks stand in the order of their schedules",
        f"{agreeing} of {told_apart} pairs in the predicted order",
        "order",
    )
if len(calm):
    worse = calm["speed_up_short"] < calm["speed_up"]
    said = "; ".join(
        f"{row.name_}: {row.speed_up:.2f}, {row.speed_up_short:.2f}"
        for row in calm.rename(columns={"name": "name_"}).itertuples()
    )
    add(
        "faster-devices-emulated",
        "faster-devices-scale-worse",
        bool(worse.all()),
        100 * float(worse.mean()),
        "%",
        "so if every engine's speed-up is lower with the shorter profile",
        f"speed-up with the full and with the short profile: {said}",
        "hidden",
    )
    after = calm.loc[calm.index.isin(["cntk_mpi/bits=32", "chainermn_mpi/naive", "caffe_mpi/end_of_backward"])]
    if len(after):
        # without overlap the step is the lone worker's and the communication: exposed and communication are equal
        full_s = {(r.place, r.key, r.workers): r.step_s for r in calm_scaling.itertuples()}
        off = {
            f"{r.name_}, {r.workers} workers": (r.communication_s - r.exposed_s) / full_s[r.place, r.Index, r.workers]
            for r in after.rename(columns={"name": "name_"}).itertuples()
        }
        add(
            "additive-step-emulated",
            "process-models",
            max(map(abs, off.values())) <= 0.1,
            100 * max(map(abs, off.values())),
            "%",
            "holds if the step of each engine that aggregates after backward is within 10 % of its lone step and its "
            "communication, t(N) = t(1) + t_c",
            "; ".join(f"{name}: {error:+.1%}" for name, error in off.items()),
            "hidden",
        )
if len(calm_scaling):
    at_most = calm_scaling[calm_scaling["workers"] == calm_scaling["workers"].max()]
    four = at_most[at_most["key"].isin(worker_engines.USUAL)]
    spread = four.groupby("place")["step_s"].agg(lambda steps: steps.max() / steps.min())
    if len(spread):
        add(
            "frameworks-differ-emulated",
            "frameworks-differ",
            bool((spread > 1.1).all()),
            float(spread.max()),
            "times",
            "holds if, with the same arithmetic, the slowest of the four takes more than 1.1 times the fastest",
            "; ".join(f"{place}: {value:.2f} times" for place, value in spread.items()),
            "scaling",
        )
    wide = at_most.pivot_table(index="place", columns="key", values="speed_up")
    if {"cntk_mpi/bits=1", *worker_engines.USUAL} <= set(wide.columns):
        best = {place: str(row.idxmax()) for place, row in wide[["cntk_mpi/bits=1", *worker_engines.USUAL]].iterrows()}
        figure = guolinke.figure("strong-fcn5-cntk-4")
        first = all(key == "cntk_mpi/bits=1" for key in best.values())
        over = wide["cntk_mpi/bits=1"] / wide["cntk_mpi/bits=32"]
        most = int(at_most["workers"].max())
        findings.append(
            (f"CNTK with 1-bit gradients scales best (here on {most})", "so here" if first else "not so here")
        )
        claims.append(
            Claim(
                id="one-bit-best-emulated",
                paper=guolinke.id,
                figure=figure.id,
                claim=f"{figure.text}: the best of four frameworks, with 1-bit gradients",
                published=figure.value,
                unit="times",
                ours=float(wide["cntk_mpi/bits=1"].max()),
                kind="emulated",
                tolerance="holds: the best of CNTK in 1 bit and the four as they are, on every network; in shape: "
                "better than in 32 bits",
                verdict=decide(figure, first, in_shape=bool((over > 1).all())),
                why="; ".join(
                    f"{place}: {worker_engines.name_of(key)} is first, 1 bit {over[place]:.2f} times as fast as 32"
                    for place, key in best.items()
                ),
                how=f"{HOW}; {most} workers and weak scaling here, 4 GPUs and strong scaling there",
                data=f"{DATA}/scaling.csv",
            )
        )
write_claims(folder / "derived/claims/frameworks.json", claims)
save(pd.DataFrame(findings, columns=["finding", "found"]), "findings")
if claims:
    ledger = pd.DataFrame([item.model_dump() for item in claims]).assign(found=[found for _, found in findings])
    display(ledger[["claim", "ours", "unit", "found", "verdict"]].set_index("claim").round(2))
else:
    display(Markdown("No claim can be held against measurements yet."))
