# %% [markdown]
# # What would the step cost with the input read ahead, and on many workers?
#
# A model is a function from a layer profile, a schedule and a link to seconds. First it predicts what was measured
# here and published elsewhere; then what nobody measured.
#
# One device that reads the next batch while it computes this one:
#
# $$t = \max(t_{io} + t_{h2d},\; t_f + t_b + t_u)$$
#
# N workers: the gradient of layer $l$ exists when the backward pass has reached it and is aggregated once the link is
# free, $\tau_c(l) = \max(\tau_c(l+1) + t_c(l+1),\; \tau_b(l) + t_b(l))$. What is still on the link when backward ends
# is the exposed part $t_{c,no}$, and the step becomes
#
# $$t = t_{io} + t_{h2d} + t_f + t_b + t_{c,no} + t_u$$
#
# A ring all-reduce of n bytes takes $t_c = 2(N-1)\alpha + 2\frac{N-1}{N} n \beta$. (Shi, Wang, Chu, arXiv 1711.05979;
# Shi, Chu, arXiv 1811.11141.)

# %% tags=["parameters"]
out: str = ""
workers: list[int] = [1, 2, 4, 8, 16, 32, 64]
links: list[str] = ["10gbe", "100gb-ib"]

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_text
from steptime.core.machine import Link, read_link
from steptime.core.step import SCHEDULES, LayerProfile, Schedule
from steptime.model import merging, published
from steptime.model.collectives import AllReduce, ring
from steptime.model.fitting import fit_all_reduce, profile_from_table
from steptime.model.step import predict_step, predict_table, sending_order
from steptime.notebook import out_folder
from steptime.report import figures, style

root = project_root()
folder = out_folder(out, "predict")
style.use()
fitted, papers_at = root / "data/derived/fit", root / "data/published"


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_text(folder / f"derived/{name}.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read(name: str) -> pd.DataFrame:
    """A table of the fit stage."""
    path = fitted / f"{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    return pd.read_csv(path)


steps, phases, layers = read("steps"), read("phases"), read("layers")
chosen = [read_link(root / "data/machines/links", name) for name in links]


def span(errors: pd.Series) -> str:
    """The smallest and the largest error in words."""
    ends = [f"{errors.min():+.1%}", f"{errors.max():+.1%}"]
    return " to ".join(dict.fromkeys(ends))


# %% [markdown]
# ## One device: predicted beside measured
#
# The phases come from steps taken apart, so even the sequential sum is a test. A step with prefetch is predicted from
# the phases of its sequential twin, once with cores of its own for reading (the maximum) and once with shared cores
# (the sum).

# %%
CASE = ["campaign", "case_id", "framework", "network", "size", "batch", "dtype", "device", "threads", "workers"]
TWIN = [name for name in CASE if name != "case_id"]


def profile_of(case: pd.Series) -> LayerProfile:
    """The layer profile that the fit stage made of a case."""
    key = ["campaign", "case_id"]
    own_layers, own_phases = (table[(table[key] == case[key]).all(axis=1)] for table in (layers, phases))
    return profile_from_table(
        own_layers,
        network=case["network"],
        source=f"{case['campaign']}: {case['case_id']}",
        batch=int(case["batch"]),
        phases_s=own_phases.set_index("phase")["time_s"].to_dict(),
    )


cases = phases[CASE].drop_duplicates(ignore_index=True)
profiles = {(case["campaign"], case["case_id"]): profile_of(case) for _, case in cases.iterrows()}
ONE_COLUMNS = [*CASE, "input", "measured_s", "lo_s", "hi_s", "predicted_s", "error", "shared_cores_s"]
one_rows = []
for _, case in cases.iterrows():
    profile = profiles[case["campaign"], case["case_id"]]
    for _, step in steps[(steps[TWIN] == case[TWIN]).all(axis=1)].iterrows():
        schedule = Schedule(prefetch=step["input"] == "prefetch")
        predicted = predict_step(profile, schedule, 1, chosen[0]).step_s
        shared = predict_step(profile, schedule, 1, chosen[0], shared_cores=True).step_s
        one_rows.append(
            {
                **step[[*CASE, "input"]],
                "measured_s": step["median_s"],
                "lo_s": step["lo_s"],
                "hi_s": step["hi_s"],
                "predicted_s": predicted,
                "error": predicted / step["median_s"] - 1,
                "shared_cores_s": shared,
            }
        )
one_device = pd.DataFrame(one_rows, columns=ONE_COLUMNS)
save(one_device, "one_device")

# %%
SETTING = ["campaign", "device", "dtype", "threads", "input"]
for (campaign, device, dtype, threads, reading), part in one_device[one_device["workers"] == 1].groupby(SETTING):
    words = f"{campaign}, {device}, {dtype}, {threads} thread{'s' if threads > 1 else ''}, {reading} input"
    title = f"Modelled over measured step: {campaign}, {device}, t{threads}, {reading} input"
    figure = figures.predicted_measured(part, title)
    style.save(figure, folder / f"figures/one-device-{campaign}-{device}-{dtype}-t{threads}-{reading}.svg")
    display(figure)
    text = f"{words}: the model is {span(part['error'])} off the measured step."
    if reading == "prefetch":
        text += f" With shared cores it would be {span(part['shared_cores_s'] / part['measured_s'] - 1)} off."
    display(Markdown(text))
for name in sorted(set(steps["campaign"]) - set(steps.loc[steps["input"] == "prefetch", "campaign"])):
    display(Markdown(f"{name}: no case with prefetch was measured, so the maximum is not tested there."))

# %% [markdown]
# ## Many workers (modelled)
#
# Weak scaling: each worker keeps its batch. Three schedules: one message after backward, one message a layer as soon
# as it is ready (wait-free), and messages merged so that the last one ends earliest. Links are sources' figures, not
# this machine's.

# %%
SPEED_UP_KEYS = ["campaign", "case_id", "framework", "device", "dtype", "threads"]
SPEED_UP_COLUMNS = [*SPEED_UP_KEYS, "network", "batch", "link", "schedule", "workers", "speed_up"]
schedules = [Schedule(name) for name in SCHEDULES]
tables = []
for _, case in cases[cases["workers"] == 1].iterrows():
    for link in chosen:
        table = predict_table(profiles[case["campaign"], case["case_id"]], schedules, workers, link)
        for place, name in enumerate(SPEED_UP_KEYS):
            table.insert(place, name, case[name])
        tables.append(table.drop(columns=["source", "prefetch"]))
predictions = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=SPEED_UP_COLUMNS)
save(predictions, "speed_up")
groups = predictions.groupby(["campaign", "framework", "device", "dtype", "threads", "link"])
for (campaign, framework, device, dtype, threads, link), part in groups:
    title = f"Speed-up, modelled: {link}, {framework} ({campaign}, {device}, t{threads})"
    figure = figures.speed_up(part, title=title)
    style.save(figure, folder / f"figures/speed-up-{campaign}-{framework}-{device}-{dtype}-t{threads}-{link}.svg")
    if link == links[0]:
        display(figure)
if predictions.empty:
    display(Markdown("No campaign has a layer profile yet, so there is nothing to predict from."))

# %% [markdown]
# ## Published steps: GoogLeNet on K80 nodes over 10 Gbit/s Ethernet
#
# The B-Caffe log has the time of every layer's backward pass and of every gradient's all-reduce, and the measured
# steps of three schedules. Three ways to get at $t_c$: the logged times themselves (wait-free only: the messages were
# the layers'), a line through them, and an independent all-reduce benchmark on the same nodes. The line through the
# wait-free log predicts steps of the two other schedules, which it has not seen.

# %%
measured = published.bcaffe_steps(papers_at).set_index(["network", "schedule", "nodes"])["step_time_s"]
SCHEDULE_NAMES = {"WFBP": "wait_free", "MG-WFBP": "merged", "one message": "end_of_backward"}
rows = []
for nodes in (2, 4, 8):
    profile = published.bcaffe_profile(papers_at, nodes)
    ready, n_bytes, _ = sending_order(profile)
    logged = published.bcaffe_layers(papers_at, nodes)["comm_s"].to_numpy()[::-1]
    one_node = profile.t_f_s + profile.t_b_s
    ends = {"WFBP: logged times": float(merging.start_times(ready, logged)[-1] + logged[-1])}
    count = {"WFBP: logged times": len(ready)}
    for how, cost in (
        ("line through the log", fit_all_reduce(n_bytes, logged)),
        ("all-reduce benchmark", published.bcaffe_all_reduce(papers_at, nodes)),
    ):
        groupings = {
            "WFBP": merging.layer_wise(len(ready)),
            "MG-WFBP": merging.published_groups(ready, n_bytes, cost),
            "one message": merging.one_message(len(ready)),
        }
        for schedule, grouping in groupings.items():
            last = merging.end_s(ready, n_bytes, grouping, cost)
            ends[f"{schedule}: {how}"] = last
            count[f"{schedule}: {how}"] = len(grouping)
    for key, end in ends.items():
        schedule, how = key.split(": ")
        predicted = one_node + max(0.0, end - profile.t_b_s)
        step = float(measured["GoogLeNet", schedule, nodes])
        rows.append(
            {
                "nodes": nodes,
                "schedule": SCHEDULE_NAMES[schedule],
                "how": how,
                "messages": count[key],
                "predicted_s": predicted,
                "measured_s": step,
                "error": predicted / step - 1,
                "speed_up": nodes * one_node / predicted,
                "measured_speed_up": nodes * float(measured["GoogLeNet", schedule, 1]) / step,
            }
        )
published_steps = pd.DataFrame(rows)
save(published_steps, "published_steps")
shown = published_steps.assign(error=published_steps["error"].map(lambda error: f"{error:+.1%}"))
shown.pivot_table(index=["schedule", "how"], columns="nodes", values="error", aggfunc="first")

# %%
curves = pd.concat(
    [
        published_steps[published_steps["how"] == "line through the log"].assign(kind="modelled"),
        published_steps.drop_duplicates(["nodes", "schedule"]).assign(
            kind="measured", speed_up=lambda table: table["measured_speed_up"]
        ),
    ]
).rename(columns={"nodes": "workers"})
figure = figures.speed_up(curves, panel=None, title="GoogLeNet on K80 nodes: speed-up, published and modelled")
style.save(figure, folder / "figures/published-speed-up.svg")
display(figure)
display(
    Markdown(
        "Modelled less measured: "
        + "; ".join(f"{how} {span(part['error'])}" for how, part in published_steps.groupby("how"))
        + ". The benchmark knows neither the copies between GPU and host nor the reduction inside a node, so what it "
        "predicts is too fast. From one node to two, about "
        f"{1e3 * float(measured['GoogLeNet', 'WFBP', 2] - measured['GoogLeNet', 'WFBP', 1]):.0f} ms are lost that no "
        "layer's time explains."
    )
)

# %% [markdown]
# ## The merging rule against the optimum (modelled)
#
# The rule as its authors shipped it, on the same profile with the compute scaled, beside the optimum of all
# contiguous groupings (dynamic programming over the same cost).

# %%
CASES = [(1, 5e-3, 2e-9), (5, 9e-4, 7.4e-10), (5, 2.4e-3, 1.5e-9), (5, 5e-3, 2e-9), (20, 5e-4, 1.5e-9)]
ready, n_bytes, _ = sending_order(published.bcaffe_profile(papers_at, 8))
rows = []
for faster, a_s, b_s_per_byte in CASES:
    cost = AllReduce(a_s, b_s_per_byte)
    scaled = ready / faster
    row = {"compute_faster": faster, "a_s": a_s, "b_s_per_byte": b_s_per_byte}
    for name, ends in (
        ("wait_free", merging.layer_wise(len(ready))),
        ("rule", merging.published_groups(scaled, n_bytes, cost)),
        ("optimum", merging.optimal_groups(scaled, n_bytes, cost)),
        ("one_message", merging.one_message(len(ready))),
    ):
        row |= {f"{name}_s": merging.end_s(scaled, n_bytes, ends, cost), f"{name}_messages": len(ends)}
    rows.append(row | {"rule_above_optimum": row["rule_s"] / row["optimum_s"] - 1})
rule = pd.DataFrame(rows)
save(rule, "merging")
shown = pd.DataFrame(
    {
        "compute": rule["compute_faster"].map(lambda factor: f"{factor} times as fast"),
        "all-reduce": [
            f"{1e3 * row.a_s:.2g} ms + {1e9 * row.b_s_per_byte:.2g} ns/B" for row in rule.itertuples(index=False)
        ],
    }
)
for name in ("wait_free", "rule", "optimum", "one_message"):
    shown[f"{name.replace('_', ' ')}, ms (messages)"] = [
        f"{1e3 * end:.1f} ({count})" for end, count in zip(rule[f"{name}_s"], rule[f"{name}_messages"], strict=True)
    ]
shown["rule above optimum"] = rule["rule_above_optimum"].map(lambda excess: f"{excess:.0%}")
display(shown.set_index("compute"))
display(
    Markdown(
        f"The rule is {rule['rule_above_optimum'].min():.0%} to {rule['rule_above_optimum'].max():.0%} above the "
        "optimum: none while backward hides the communication, more once it is exposed."
    )
)

# %% [markdown]
# ## The ring's law
#
# If a ring all-reduce is bound by the link, its seconds a byte over N nodes are $2\frac{N-1}{N}$ times those of the
# link.

# %%
network_fits = read_paper(papers_at / "hkbu-network-fits.yaml")
value = {figure.id: figure.value for figure in network_fits.figures}
iperf = Link(name="iperf", alpha_s=0.0, beta_s_per_byte=8 / (value["iperf-10gbe"] * 1e9), source="hkbu-network-fits")
law = pd.DataFrame(
    [
        {"nodes": nodes, "published": value[f"ring-beta-{nodes}"], "ours": ring(nodes, iperf).b_s_per_byte}
        for nodes in (2, 4, 8)
    ]
)
law["error"] = law["ours"] / law["published"] - 1
save(law, "ring_law")
shown = law.assign(error=law["error"].map(lambda error: f"{error:+.1%}"))
for name in ("published", "ours"):
    shown[name] = (1e9 * law[name]).map(lambda ns: f"{ns:.4f}")
shown.rename(columns={"published": "published, ns/B", "ours": "ring's law, ns/B"}).set_index("nodes")

# %% [markdown]
# ## The published extrapolation to 64 nodes (modelled)
#
# As the authors' script has it: ring with a reduction term, forward taken as half of backward. Layers in backward
# order.

# %%
NODES, ALPHA_S, BETA, GAMMA = 64, 45.25e-6, 1.2 / (9 * 2**30 / 8), 160 / 64e9
cost = AllReduce(2 * NODES * ALPHA_S, 2 * (NODES - 1) / NODES * BETA + (NODES - 1) / NODES * GAMMA)
t_b = float(ready[-1])
far = pd.DataFrame(
    [
        {"schedule": name, "messages": len(ends), "speed_up": NODES * 1.5 * t_b / (0.5 * t_b + end)}
        for name, ends in (
            ("wait_free", merging.layer_wise(len(ready))),
            ("rule", merging.published_groups(ready, n_bytes, cost)),
            ("merged", merging.optimal_groups(ready, n_bytes, cost)),
        )
        for end in [max(t_b, merging.end_s(ready, n_bytes, ends, cost))]
    ]
    + [
        {
            "schedule": "end_of_backward",
            "messages": 1,
            "speed_up": NODES * 1.5 * t_b / (1.5 * t_b + cost.time_s(float(n_bytes.sum()))),
        }
    ]
)
save(far, "extrapolation_64")
far.assign(speed_up=far["speed_up"].map(lambda value: f"{value:.1f}")).set_index("schedule")

# %% [markdown]
# ## Claims
#
# Figures that nobody could check against a source decide nothing, nor does what only this machine measured: claims
# about measurements rest on committed campaigns. The bound of 10 % on predicted steps was chosen when these errors
# were known, so within it a claim holds in shape and no more.

# %%
papers = {path.stem: read_paper(path) for path in sorted(papers_at.glob("*.yaml"))}
BOUND = 0.10
claims: list[Claim] = []


def claim(paper: str, name: str, table: str, *, holds: bool = False, in_shape: bool = False, **given) -> None:
    """Add the claim on figure `name` of `paper`; `given`: the other fields, a verdict only where no data decide."""
    figure = next(item for item in papers[paper].figures if item.id == name)
    verdict = decide(figure, holds, in_shape=in_shape)
    given["verdict"] = given.get("verdict", verdict) if figure.verified else verdict
    fixed = {"paper": paper, "figure": name, "claim": figure.text, "published": figure.value, "unit": figure.unit}
    claims.append(
        Claim(**({"id": name, "ours": None, "kind": "modelled"} | fixed | given), data=f"data/derived/{table}")
    )


for row in law.itertuples():
    claim(
        "hkbu-network-fits",
        f"ring-beta-{row.nodes}",
        "predict/ring_law.csv",
        ours=row.ours,
        holds=abs(row.error) <= 0.03,
        tolerance="within 3 %",
        how="2(N-1)/N over the bandwidth that iperf measured on the same network",
        why=f"{row.error:+.1%}: large messages on a forced ring are bound by the link",
    )

SLUGS = {"wait_free": "wfbp", "merged": "mg-wfbp", "end_of_backward": "one-message"}
REASONS = {
    "logged times": "the log explains the growth with the nodes, not the time lost at once from one node to two",
    "all-reduce benchmark": "the benchmark knows neither the copies between GPU and host nor the reduction in a node",
    "line through the log": "the log's all-reduce times contain those copies, so the line does too",
}
tested = published_steps[
    (published_steps["how"] == "logged times")
    | ((published_steps["how"] == "all-reduce benchmark") & (published_steps["schedule"] != "wait_free"))
]
for row in tested.itertuples():
    claim(
        "mg-wfbp-2018",
        f"step-googlenet-{SLUGS[row.schedule]}-{row.nodes}",
        "predict/published_steps.csv",
        ours=1e3 * row.predicted_s,
        in_shape=abs(row.error) <= BOUND,
        tolerance=f"within {BOUND:.0%}, a bound chosen when the errors were known",
        how=f"recursion of start times on the K80 layer log; t_c: {row.how}; {row.messages} messages",
        why=f"{row.error:+.1%}: {REASONS[row.how]}",
    )
eight = published_steps[(published_steps["nodes"] == 8) & (published_steps["how"] == "line through the log")]
for row in eight.itertuples():
    error = row.speed_up / row.measured_speed_up - 1
    claim(
        "mg-wfbp-2018",
        f"speedup-googlenet-{SLUGS[row.schedule]}-8",
        "predict/published_steps.csv",
        ours=row.speed_up,
        in_shape=abs(error) <= BOUND,
        tolerance=f"within {BOUND:.0%}, a bound chosen when the errors were known",
        how="K80 layer log; t_c: line through the wait-free log's all-reduce times",
        why=f"{error:+.1%}: {REASONS[row.how]}",
    )
    claim(
        "mg-wfbp-2018",
        f"speedup-resnet50-{SLUGS[row.schedule]}-8",
        "predict/published_steps.csv",
        verdict="inconclusive",
        tolerance=f"within {BOUND:.0%}",
        how="none",
        why="the log of layer times that was published is GoogLeNet's only",
    )
gain = eight.set_index("schedule")["speed_up"]
claim(
    "mg-wfbp-2018",
    "merge-order",
    "predict/published_steps.csv",
    in_shape=bool(gain["merged"] > gain["wait_free"] > gain["end_of_backward"]),
    tolerance="holds: the same order in both networks; in shape: in one",
    how="K80 layer log of GoogLeNet; t_c: line through the wait-free log's all-reduce times",
    why=f"{gain['merged']:.2f}, {gain['wait_free']:.2f}, {gain['end_of_backward']:.2f} times for GoogLeNet, from a "
    "line that has seen the wait-free log only; ResNet-50 has no log",
)
excess = 100 * float(rule["rule_above_optimum"].max())
claim(
    "mg-wfbp-2018",
    "merge-optimal",
    "predict/merging.csv",
    ours=excess,
    holds=excess < 0.1,
    tolerance="no more than 0.1 % above the optimum in every case",
    how="the rule in the authors' code against dynamic programming over all contiguous groupings, K80 layer log, "
    "compute scaled, same cost; the paper's text was not to be had",
    why="the rule merges one pair at a time and looks at the next gradient only: optimal while backward hides the "
    "communication, not where it is exposed",
)
far_gain = far.set_index("schedule")["speed_up"]
for name, other in (("gain-64-over-wfbp", "wait_free"), ("gain-64-over-one-message", "end_of_backward")):
    claim(
        "mg-wfbp-2018",
        name,
        "predict/extrapolation_64.csv",
        ours=float(far_gain["merged"] / far_gain[other]),
        tolerance="none: the figure could not be checked",
        how="optimal grouping, the authors' constants, layers in backward order",
        why=f"with the shipped rule the ratio is {far_gain['rule'] / far_gain[other]:.2f}",
    )
mean_error = 100 * float(published_steps.loc[published_steps["how"] == "logged times", "error"].abs().mean())
for name in ("error-alexnet", "error-googlenet", "error-resnet50", "link-use-resnet50"):
    is_ours = name == "error-googlenet"
    claim(
        "ssgd-dag-2018",
        name,
        "predict/published_steps.csv",
        ours=mean_error if is_ours else None,
        tolerance="none: the figure could not be checked",
        how="K80 layer log of B-Caffe, wait-free, 2, 4 and 8 nodes" if is_ours else "none",
        why="another Caffe and another run than the paper's"
        if is_ours
        else "no layer log of that network is to be had",
    )
for name in ("cntk-no-overlap", "alexnet-decode-bound"):
    claim(
        "ssgd-2017",
        name,
        "predict/one_device.csv",
        tolerance="none: the figure could not be checked",
        how="none",
        why="neither that framework's version nor that input has been measured here",
    )
for name in ("speedup-alexnet-16", "speedup-googlenet-16", "speedup-resnet-16"):
    claim(
        "caffe-mpi",
        name,
        "predict/one_device.csv",
        verdict="needs a GPU",
        tolerance=f"within {BOUND:.0%}",
        how="none",
        why="needs a layer profile of a Tesla P40; none is published",
    )

# %% [markdown]
# Of the claims, two rest on committed campaigns: that reading ahead leaves the larger of reading and computing, and
# that frameworks differ.

# %%
ahead = one_device[(one_device["campaign"] != "local") & (one_device["input"] == "prefetch")]
errors = 100 * ahead["error"].abs()
claim(
    "ssgd-2017",
    "process-models",
    "predict/one_device.csv",
    id="prefetch-is-the-maximum",
    unit="%",
    claim="With the input read ahead the step is the larger of reading and computing: median error of the prediction",
    kind="modelled",
    ours=float(errors.median()) if len(errors) else None,
    holds=bool(len(errors)) and errors.max() <= 100 * BOUND,
    in_shape=bool(len(errors)) and errors.median() <= 100 * BOUND,
    tolerance=f"holds: every case within {BOUND:.0%}; in shape: the median within {BOUND:.0%}",
    how="phases of the sequential case, max(t_io + t_h2d, t_f + t_b + t_u), against the measured prefetch case",
    why=f"{len(errors)} cases, {errors.min():.1f} to {errors.max():.1f} % off"
    if len(errors)
    else "no committed campaign has cases with prefetch",
    **({} if len(errors) else {"verdict": "inconclusive"}),
)
pairs = read("comparisons")
pairs = pairs[(pairs["campaign"] != "local") & (pairs["input"] == "sequential")]
apart = pairs["different"].astype(bool)
# Pairs that cannot be told apart speak against the claim only where the interval is narrow.
is_undecided = not apart.any() and not (pairs["hi"] / pairs["lo"] < 1 + BOUND).all()
claim(
    "ssgd-2017",
    "frameworks-differ",
    "fit/comparisons.csv",
    unit="%",
    claim="Frameworks differ in the time of the same step on the same device: share of cases in which they do",
    kind="measured",
    ours=100 * float(apart.mean()) if len(pairs) else None,
    holds=bool(len(pairs)) and bool(apart.all()),
    in_shape=bool(apart.any()),
    tolerance="different at 1 %, paired by round; holds: in every case; in shape: in some; inconclusive: in none, with "
    f"an interval wider than {BOUND:.0%}",
    how="step times of each network in each framework, rounds interleaved",
    why="; ".join(
        f"{row.network} ({row.device}): {row.faster} by {row.ratio:.2f} times" for row in pairs[apart].itertuples()
    )
    or ("no pair can be told apart" if len(pairs) else "no committed campaign has two frameworks"),
    **({"verdict": "inconclusive"} if is_undecided or pairs.empty else {}),
)
write_claims(folder / "derived/claims/ssgd.json", claims)
ledger = pd.DataFrame([item.model_dump() for item in claims])
counts = "; ".join(f"{verdict}: {count}" for verdict, count in ledger["verdict"].value_counts().items())
display(Markdown(f"{len(ledger)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
