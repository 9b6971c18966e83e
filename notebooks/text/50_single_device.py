# %% [markdown]
# # Which framework is fastest on one device, and why?
#
# The same networks, from one description, in every setting that could be made to run: frameworks of today and those
# of 2015 to 2018. First what runs where; then which setting wins, with ties called ties; then where the differences
# come from: phases, kinds of layers, the machine's two peaks, memory. (The single-device part of Shi, Wang, Chu, arXiv
# 1711.05979.)
#
# A *setting* is a framework in one of its ways of running. Comparisons are about one thread, float32 and input read in
# sequence unless a table says otherwise; a setting of another type says so in its name.

# %% tags=["parameters"]
out: str = ""
memory_gib: float = 8.0

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.campaign import Campaign, read_campaign
from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.core.gap import GAP_COLUMNS, PARTS, gaps
from steptime.core.parity import comparable, overfull, read_parity
from steptime.core.statistics import agreement, setting_names
from steptime.model import cases, choosing, memory
from steptime.model.roofline import balance, roofline
from steptime.networks import build
from steptime.notebook import campaign_folders, out_folder
from steptime.report import figures, panels, style

root = project_root()
folder = out_folder(out, "single_device")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)
PRIMARY = ["alexnet", "googlenet", "resnet50"]


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


def fitted(name: str) -> pd.DataFrame:
    """A table of the fit stage."""
    path = root / f"data/derived/fit/{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run fit` (or `make study`) first")
    return pd.read_csv(path)


folders = campaign_folders(root)
campaigns = {name: read_campaign(path) for name, path in folders.items()}


def machine_key(campaign: Campaign) -> set[tuple]:
    """What must be equal for two campaigns to be of one machine, as far as they tell."""
    runs = campaign.runs.assign(gib=(campaign.runs["memory_bytes"] / 2**30).round(), gpu=campaign.runs["gpu_model"])
    return set(runs[["cpu_model", "gib", "cores_allowed", "gpu"]].fillna("").itertuples(index=False, name=None))


machines = {
    name: choosing.machine_of(path, root / "data/raw/machine/machine.json" if name == "local" else None)
    for name, path in folders.items()
}
if not campaigns:
    display(Markdown("No campaign is there yet: `steptime run measure` makes one of this machine."))


def stacked_rows(make: object, columns: list[str]) -> pd.DataFrame:
    """The rows that `make` gives for each campaign."""
    parts = [make(campaign) for campaign in campaigns.values()]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


every = stacked_rows(cases.case_table, cases.CASE_COLUMNS)
phases = stacked_rows(cases.phase_table, cases.PHASE_COLUMNS)
missing = stacked_rows(cases.not_run_table, cases.NOT_RUN_COLUMNS)
standing = stacked_rows(
    lambda campaign: choosing.standings(comparable(campaign, folders[campaign.name])), choosing.STANDING_COLUMNS
)
for name, table in (("cases", every), ("phases", phases), ("not_run", missing), ("standings", standing)):
    save(table, name)
main = cases.main_conditions(every)
too_busy = set().union(*(overfull(campaign) for campaign in campaigns.values()))
KEY = ["campaign", *cases.CASE]
main_standing = main.merge(standing, on=["campaign", *cases.CONDITIONS, "setting"])
save(main_standing[[*KEY, "setting", "median_s", "ratio", "lo", "hi", "standing"]], "main_standings")
measured_in = sorted(main["campaign"].unique(), key=lambda name: (name == "local", name))

# %% [markdown]
# ## What runs where
#
# Milliseconds of a step under the conditions compared below; where there is none, a number that the list below the
# table explains. Parity (the same outputs and gradients as eager torch from the same weights) comes before speed: a
# pair that fails it is
# marked ✗ and is in no ranking; nor is a setting that kept more cores busy than its threads (* with how many).

# %%


def matrix(name: str) -> tuple[pd.DataFrame, list[str]]:
    """What runs where in a campaign: cells of text, settings down, networks across, and the reasons."""
    own, gone = main[main["campaign"] == name], missing[missing["campaign"] == name]
    parity = read_parity(folders[name])
    parity["setting"] = setting_names(parity)
    failed = set(
        parity.loc[parity["verdict"].isin(["differs", "failed"]), ["setting", "network"]]
        .itertuples(index=False, name=None)
    )  # fmt: skip
    times = {(row.setting, row.network): row.median_s for row in own.itertuples()}
    # What the adapter said, without the command and the type of its exception.
    why = {(row.setting, row.network): str(row.reason).split("Error: ", 1)[-1] for row in gone[::-1].itertuples()}
    forward = phases[(phases["campaign"] == name) & (phases["phase"] == "forward")]
    only = {
        (row.setting, row.network): row.time_s
        for row in forward[~forward["setting"].isin(every["setting"])].itertuples()
    }
    reasons = list(dict.fromkeys(why[pair] for pair in sorted(why) if pair not in times))
    settings = sorted({pair[0] for pair in [*times, *only, *why]})
    networks = sorted({pair[1] for pair in [*times, *only, *why]})

    greedy = {(row.setting, row.network): row.cpu_share for row in own.itertuples() if row.case_id in too_busy}

    def cell(pair: tuple[str, str]) -> str:
        if pair in times:
            cores = f" * {greedy[pair]:.2g} cores" if pair in greedy else ""
            return f"{1e3 * times[pair]:.3g}" + (" ✗" if pair in failed else "") + cores
        if pair in only:
            return f"forward only {1e3 * only[pair]:.3g}"
        return f"({reasons.index(why[pair]) + 1})" if pair in why else "not planned"

    rows = {setting: [cell((setting, network)) for network in networks] for setting in settings}
    return pd.DataFrame.from_dict(rows, orient="index", columns=networks), reasons


for name in measured_in:
    table, reasons = matrix(name)
    parity = read_parity(folders[name])
    told = parity["verdict"].value_counts().sort_index().to_dict()
    said = "; ".join(f"{count} {verdict}" for verdict, count in told.items()) or "not recorded with this campaign"
    display(Markdown(f"**{name}**, step in ms. Parity: {said}."), table)
    display(Markdown("\n".join(f"{place}. {reason}" for place, reason in enumerate(reasons, start=1))))

# %% [markdown]
# ## Parity of all networks
#
# Every setting on every network of the study, in small variants that have each kind of layer: the largest distance
# ‖a − b‖ / ‖b‖ of a gradient from eager torch's in float32 (of the outputs where there is no training), at the same
# weights and batch, dropout off. ✗: beyond the tolerance of its dtype. The loss fell in training wherever a distance
# stands alone.

# %%


def parity_matrix(parity: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The parity table as cells of text, settings down, networks across, and the reasons that they number."""
    told = parity["reason"].fillna("").str.split("Error: ", n=1).str[-1]
    said = parity["verdict"] + ": " + told
    numbered = parity["verdict"].ne("agrees")
    reasons = list(dict.fromkeys(said[numbered]))
    distance = parity["worst_gradient"].fillna(parity["worst_output"])
    cells = []
    for place, row in parity.iterrows():
        shown = f"{distance[place]:.0e}" if pd.notna(distance[place]) else ""
        if row["verdict"] != "agrees":
            mark = " ✗" if row["verdict"] in ("differs", "failed") else ""
            shown = f"{shown}{mark} ({reasons.index(said[place]) + 1})".strip()
        elif row["loss_falls"] is False:
            shown += ", loss did not fall"
        cells.append(shown)
    table = parity.assign(cell=cells, setting=setting_names(parity))
    return table.pivot(index="setting", columns="network", values="cell"), reasons


for name in measured_in:
    parity = read_parity(folders[name])
    if len(parity):
        table, reasons = parity_matrix(parity)
        display(Markdown(f"**{name}**"), table)
        display(Markdown("\n".join(f"{place}. {reason}" for place, reason in enumerate(reasons, start=1))))

# %% [markdown]
# ## Which setting wins
#
# Each setting against the fastest of its network, paired by round. The level is corrected for the number of
# comparisons (Holm); what cannot be told from the fastest is tied with it. The intervals hold all at once, which is
# more than that decision needs: a setting can be told apart whose interval just reaches 1.

# %%
for name in measured_in:
    own = main_standing[main_standing["campaign"] == name]
    if own.empty:
        continue
    figure = panels.standings(own, f"Step time over the fastest setting's, measured ({name})")
    style.save(figure, folder / f"figures/standings-{name}.svg")
    display(figure)


# %%
def won(name: str) -> pd.DataFrame:
    """One row a network: the fastest setting, what is tied with it, the next and the slowest."""
    rows = []
    for (network, batch), part in main_standing[main_standing["campaign"] == name].groupby(["network", "batch"]):
        first = part[part["standing"].isin(["fastest", "alone"])].iloc[0]
        slower = part[part["standing"] == "slower"].sort_values("ratio")
        of = [f"{row.ratio:.3g} ({row.lo:.3g} to {row.hi:.3g}) {row.setting}" for row in slower.itertuples()]
        rows.append(
            {
                "network": network,
                "batch": batch,
                "fastest": first["setting"],
                "step, ms": f"{1e3 * first['median_s']:.3g}",
                "tied with it": ", ".join(part.loc[part["standing"] == "tied", "setting"]) or "–",
                "next, times as long": of[0] if of else "–",
                "slowest, times as long": of[-1] if of else "–",
            }
        )
    return pd.DataFrame(rows)


for name in measured_in:
    display(Markdown(f"**{name}**"), won(name).set_index("network"))

# %% [markdown]
# ## Does a second campaign of the same machine agree?
#
# For every two campaigns of one machine: of the pairs of settings that the first calls different, how many the second
# puts in the same order.

# %%
agreements = []
for first, a in campaigns.items():
    for second, b in campaigns.items():
        if first == second or machine_key(a) != machine_key(b):
            continue
        found = agreement(a.joined(), b.joined())
        if found.in_both:
            agreements.append(
                {"first": first, "second": second, "pairs": found.pairs, "different": found.different}
                | {"in_both": found.in_both, "agreeing": found.agreeing, "share": found.agreeing / found.in_both}
            )
AGREEMENT = ["first", "second", "pairs", "different", "in_both", "agreeing", "share"]
agreed = pd.DataFrame(agreements, columns=AGREEMENT)
save(agreed, "agreement")
if agreed.empty:
    display(Markdown("No two campaigns here are of one machine and share settings that differ."))
else:
    shown = agreed.assign(share=agreed["share"].map("{:.1%}".format)).rename(columns={"in_both": "of them in both"})
    display(shown.set_index(["first", "second"]))

# %% [markdown]
# ## Where the time goes: phases
#
# Reading, copying to the device, forward, backward, update, each ended by a synchronisation. A setting that runs the
# step as one piece has no phases: its row says so. A bar's number is the sum of the phases, which differs from the step
# time above by what the synchronisations cost. Networks are those of the primary paper where they were measured.

# %%


def shown_networks(name: str) -> list[str]:
    """The primary paper's networks, or the first three, of a campaign's main comparison."""
    own = list(main.loc[main["campaign"] == name, "network"].unique())
    return [network for network in PRIMARY if network in own] or own[:3]


def in_order(part: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of the networks shown, settings sorted by name, and networks in the paper's order."""
    shown = shown_networks(name)
    part = part[part["network"].isin(shown)]
    return part.assign(place=part["network"].map(shown.index)).sort_values(["place", "setting"], kind="stable")


main_phases = main[[*KEY, "setting", "median_s"]].merge(phases[[*KEY, "phase", "time_s"]], on=KEY)
taken_apart = main_phases[main_phases["phase"] != "io"][KEY].drop_duplicates()
main_phases = main_phases.merge(taken_apart, on=KEY)
for name in measured_in:
    own = in_order(main_phases[main_phases["campaign"] == name], name)
    if own.empty:
        continue
    own = own.assign(part=own["phase"].map(figures.PHASE_LABELS))
    title = f"Phases of a step, measured ({name})"
    figure = panels.stacked(own, panels.PHASE_COLOURS, title, "sum of the phases, ms", "not measured")
    style.save(figure, folder / f"figures/phases-{name}.svg")
    display(figure)
    whole = sorted(set(main.loc[main["campaign"] == name, "setting"]) - set(main_phases["setting"]))
    if whole:
        display(Markdown(f"Run in one piece, without phases: {', '.join(whole)}."))

# %% [markdown]
# ## Where the time goes: kinds of layers
#
# Layer times are scaled so that they add up to the forward and backward pass timed in one piece; what is left of the
# step is outside the layers: reading, copying, updating, and time between. Settings that fuse layers have fused
# regions, not layers: nothing here can be said of them.

# %%
layer_times = fitted("layers")
kinds = {}
for pair in sorted(set(zip(main["network"], main["size"], strict=True))):
    for layer in build(pair[0], size=pair[1]).layers:
        kinds[(*pair, layer.name)] = cases.group_of(layer.kind)
layer_times = main[[*KEY, "case_id", "setting", "median_s"]].merge(layer_times, on=["campaign", "case_id"])
layer_times["group"] = [
    kinds.get(key, "moving")
    for key in zip(layer_times["network"], layer_times["size"], layer_times["layer"], strict=True)
]
layer_times["time_s"] = layer_times["forward_s"] + layer_times["backward_s"]
in_layers = layer_times.groupby([*KEY, "setting", "median_s", "group"], as_index=False)["time_s"].sum()
outside = in_layers.groupby([*KEY, "setting", "median_s"], as_index=False)["time_s"].sum()
outside["time_s"] = (outside["median_s"] - outside["time_s"]).clip(lower=0)
kind_times = pd.concat([in_layers, outside.assign(group="outside layers")], ignore_index=True)
save(kind_times.drop(columns="setting").sort_values([*KEY, "group"]), "layer_kinds")
for name in measured_in:
    own = in_order(kind_times[kind_times["campaign"] == name].rename(columns={"group": "part"}), name)
    if own.empty:
        continue
    title = f"A step by kind of layer, measured ({name})"
    figure = panels.stacked(own, panels.KIND_COLOURS, title, "layers, and the rest of the step, ms", "not measured")
    style.save(figure, folder / f"figures/layer-kinds-{name}.svg")
    display(figure)
    fused = sorted(set(main.loc[main["campaign"] == name, "setting"]) - set(kind_times["setting"]))
    if fused:
        display(Markdown(f"Without layer times (fused or run in one piece): {', '.join(fused)}."))

# %% [markdown]
# ## Why the fastest is fastest
#
# The fastest setting of each network against the next one that can be told apart, and against another setting of its
# own framework, from which one thing differs (type, layout, compiler, or who wrote the step). Told by kinds of layers
# where both have layer times, else by phases where both have them. Of a setting that runs in one piece, only the whole
# is known: then nothing here says which part made the difference.

# %%
plain = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}


def parts_of(name: str, network: str, settings: tuple[str, str]) -> tuple[pd.DataFrame, str]:
    """The finest parts that two settings of a network share: parts down, the settings across; and what they are."""
    by_kind = kind_times.rename(columns={"group": "part"})
    for table, what in ((by_kind, "by kind of layer"), (main_phases.rename(columns={"phase": "part"}), "by phase")):
        own = table[(table["campaign"] == name) & (table["network"] == network) & table["setting"].isin(settings)]
        wide = own.pivot_table(index="part", columns="setting", values="time_s", aggfunc="sum").fillna(0.0)
        if set(settings) <= set(wide.columns):
            return wide, what
    return pd.DataFrame(), "in one piece"


def won_by(name: str) -> pd.DataFrame:
    """One row a network and rival: how much longer the rival takes, and in which parts."""
    rows = []
    for (network, batch), part in main_standing[main_standing["campaign"] == name].groupby(["network", "batch"]):
        times = part.set_index("setting")
        first = times.index[times["standing"].isin(["fastest", "alone"])][0]
        slower = times[times["standing"] == "slower"].sort_values("ratio")
        own = plain.get(times.loc[first, "framework"], first)
        for rival in dict.fromkeys([*slower.index[:1], *({own} & set(times.index) - {first})]):
            wide, what = parts_of(name, network, (first, rival))
            apart = (wide[rival] - wide[first]).sort_values(key=abs, ascending=False) if len(wide) else pd.Series()
            rows.append(
                {"network": network, "batch": batch, "fastest": first, "against": rival}
                | {"takes longer, ms": f"{1e3 * (times.loc[rival, 'median_s'] - times.loc[first, 'median_s']):+.3g}"}
                | {"times": f"{times.loc[rival, 'ratio']:.3g}", "standing": times.loc[rival, "standing"], "known": what}
                | {"in, ms": ", ".join(f"{kind} {1e3 * seconds:+.3g}" for kind, seconds in apart[:4].items()) or "–"}
            )
    return pd.DataFrame(rows)


for name in measured_in:
    reasons = won_by(name)
    if len(reasons):
        display(Markdown(f"**{name}**"), reasons)

# %% [markdown]
# What makes the slowest slow, where both have layer times:

# %%
ahead = main_standing[main_standing["standing"] != "slower"]
tied = {key: set(part["setting"]) for key, part in ahead.groupby(["campaign", "network"])}


def explain(name: str) -> list[str]:
    """For each network: the fastest against the slowest setting with layers, and the kinds that make the difference."""
    said = []
    own = kind_times[kind_times["campaign"] == name]
    for network, part in own.groupby("network", sort=True):
        wide = part.pivot_table(index="setting", columns="group", values="time_s", aggfunc="sum").fillna(0.0)
        total = part.drop_duplicates("setting").set_index("setting")["median_s"]
        if len(total) < 2:
            continue
        fast, slow = total.idxmin(), total.idxmax()
        apart = (wide.loc[slow] - wide.loc[fast]).sort_values(key=abs, ascending=False)
        of = ", ".join(f"{kind} {1e3 * seconds:+.3g} ms" for kind, seconds in apart.head(3).items())
        pair = {fast, slow}
        if len(set(tied.get((name, network), ())) & pair) == len(pair):
            said.append(f"{network}: {fast} and {slow} are tied")
            continue
        difference = 1e3 * (total[slow] - total[fast])
        said.append(f"{network}: {slow} takes {difference:.3g} ms longer than {fast}; the largest parts: {of}")
    return said


for name in measured_in:
    lines = explain(name)
    if lines:
        display(Markdown(f"**{name}**\n\n" + "\n".join(f"* {line}." for line in lines)))

# %% [markdown]
# ## What lies between the layers
#
# The step less the sum of its layers as they were timed, and which named events that is: reading, copying, loss,
# update, dispatch (nothing else runs), operations of no layer. What no event explains is told: where layers were timed
# one by one, with what that costs; where they were timed inside a step, what the instruments add and miss. The step
# here is that of the processes that timed layers, with their instruments: not the step time compared above.

# %%
gap_parts = []
for name, campaign in campaigns.items():
    runs = campaign.runs[campaign.runs["case_id"].isin(main.loc[main["campaign"] == name, "case_id"])]
    samples = campaign.samples[campaign.samples["run_id"].isin(runs["run_id"])]
    gap_parts.append(gaps(Campaign(name, runs, samples)).assign(campaign=name))
gap = pd.concat(gap_parts, ignore_index=True) if gap_parts else pd.DataFrame(columns=["campaign", *GAP_COLUMNS])
save(gap[["campaign", *GAP_COLUMNS]], "gaps")
gap = main[["campaign", "case_id", "network", "setting"]].merge(gap, on=["campaign", "case_id"])
EVENTS = [*(f"{event}_s" for event in PARTS.values()), "unexplained_s"]
for name in measured_in:
    own = gap[(gap["campaign"] == name) & gap["network"].isin(shown_networks(name))].sort_values(["network", "setting"])
    if own.empty:
        continue
    times = own[["step_s", "layers_s", "gap_s", *EVENTS]].map(lambda seconds: f"{1e3 * seconds:.3g}")
    times.columns = [f"{column.removesuffix('_s')}, ms" for column in times.columns.str.replace("step_s", "profiled_s")]
    shown = pd.concat([own[["network", "setting", "profile"]], times], axis=1)
    shown["of the gap named"] = own["attributed_share"].map(lambda share: f"{share:.0%}" if share > 0 else "none")
    every_gap = gap[gap["campaign"] == name]
    enough = int((every_gap["attributed_share"] >= 0.8).sum())
    display(Markdown(f"**{name}**"), shown.set_index(["network", "setting"]))
    display(Markdown(f"At least 80 % of the gap is named in {enough} of {len(every_gap)} cases (all networks)."))

# %% [markdown]
# ## What the machine allows: the roofline
#
# A layer's rate is at most $\min(P, I \cdot B)$: $P$ the peak of a large matrix product, $B$ the bandwidth of a large
# copy, $I$ the layer's operations a byte (Williams, Waterman, Patterson 2009). Bytes by the description: inputs,
# output, parameters, and in backward their gradients, each once. Left of the ridge a layer is bound by memory. A point
# above the slope had its values in the cache. One point a layer, both passes together; the table is over all networks.

# %%
rooflines = []
for name, machine in machines.items():
    own = layer_times[
        (layer_times["campaign"] == name) & (layer_times["device"] == "cpu") & (layer_times["dtype"] == "float32")
    ]
    if machine is None or own.empty or not (own["threads"] == machine.cores).all():
        continue
    for _, part in own.groupby("case_id", sort=True):
        first = part.iloc[0]
        network = build(first["network"], size=first["size"])
        table = roofline(network, int(first["batch"]), first["dtype"], machine, part)
        rooflines.append(table.assign(**{key: first[key] for key in [*KEY, "setting"]}))
ROOFLINE = ["layer", "kind", "pass", "flops", "bytes", "intensity", "bound", "time_s", "flops_per_s", "bytes_per_s"]
ROOFLINE = [*KEY, *ROOFLINE, "attainable_flops_per_s", "reached"]
reached = pd.concat(rooflines, ignore_index=True) if rooflines else pd.DataFrame(columns=[*ROOFLINE, "setting"])
save(reached[ROOFLINE], "roofline")
for name in measured_in:
    own = reached[reached["campaign"] == name]
    if own.empty:
        timed = name in set(layer_times["campaign"])
        lacks = (
            "the peaks of its machine, at its threads, are not recorded with it" if timed else "no layers were timed"
        )
        display(Markdown(f"**{name}**: {lacks}, so it has no roofline."))
        continue
    machine = machines[name]
    own = own.assign(group=own["kind"].map(cases.group_of)).sort_values("setting", kind="stable")
    shown = own[own["network"].isin(shown_networks(name))]
    points = shown.groupby(["setting", "network", "layer", "group"], as_index=False)[["flops", "bytes", "time_s"]].sum()
    points["intensity"], points["flops_per_s"] = points["flops"] / points["bytes"], points["flops"] / points["time_s"]
    where = ", ".join(shown_networks(name))
    figure = panels.roofline(points, machine, f"Layers under the machine's roof ({name}; {where})")
    style.save(figure, folder / f"figures/roofline-{name}.svg")
    display(figure)
    bound = own.assign(time_s=own["time_s"].where(own["bound"] == "memory", 0.0)).groupby("setting")["time_s"].sum()
    all_s, least = (
        own.groupby("setting")["time_s"].sum(),
        (own["reached"] * own["time_s"]).groupby(own["setting"]).sum(),
    )
    layers = own.drop_duplicates(["network", "layer", "pass"])
    counts = layers[layers["bound"] == "memory"]["kind"].map(cases.group_of).value_counts()
    display(
        Markdown(
            f"**{name}**: peak {machine.peak_flops_per_s / 1e9:.3g} GFLOP/s, copy "
            f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s, ridge at {balance(machine):.3g} FLOPs a byte. By the "
            f"description {(layers['bound'] == 'memory').sum()} of {len(layers)} layer passes are bound by memory: "
            + ", ".join(f"{group} {count}" for group, count in counts.items())
            + "."
        ),
        pd.DataFrame(
            {
                "of the layers' time in memory-bound ones": (bound / all_s).map("{:.0%}".format),
                "least time by the roof, of the layers' time": (least / all_s).map("{:.0%}".format),
            }
        ),
    )

# %% [markdown]
# ## Does it fit: peak memory
#
# The description knows parameters, gradients, activations and the largest gradients alive at once. A base and a factor
# for each setting are fitted to measured peaks; the test leaves a network out and predicts it from the others. The
# base is most of these peaks, so the last column shows what predicting the others' mean would give.

# %%
sized = memory.memory_cases(every)
networks = {pair: build(pair[0], size=pair[1]) for pair in set(zip(sized["network"], sized["size"], strict=True))}
SETTING = ["campaign", "setting", "dtype", "device", "threads"]
fits, tested = [], []
for key, part in sized.groupby(SETTING, sort=True):
    if part["described_bytes"].nunique() < memory.FEWEST_NETWORKS:
        continue
    fit = memory.fit_memory(part["described_bytes"].to_numpy(), part["peak_memory_bytes"].to_numpy())
    left = memory.left_out(part)
    tested.append(left)
    fits.append(
        dict(zip(SETTING, key, strict=True))
        | {"networks": part["network"].nunique(), "base_bytes": fit.base_bytes, "factor": fit.factor}
        | {"median_error": left["error"].abs().median(), "worst_error": left["error"].abs().max()}
        | {"constant_error": left["constant_error"].abs().max()}
    )
FIT_COLUMNS = [*SETTING, "networks", "base_bytes", "factor", "median_error", "worst_error", "constant_error"]
memory_fits = pd.DataFrame(fits, columns=FIT_COLUMNS)


def percent(share: float) -> str:
    """A share as text; where one network alone was measured, none is left to predict it from."""
    return "–" if pd.isna(share) else f"{share:.1%}"


predicted = pd.concat(tested) if tested else sized.iloc[:0].assign(predicted_bytes=0.0, error=0.0)
save(memory_fits, "memory_fits")
save(predicted[[*KEY, "described_bytes", "peak_memory_bytes", "predicted_bytes", "error"]], "memory")
for name in measured_in:
    own = memory_fits[memory_fits["campaign"] == name]
    if own.empty:
        continue
    shown = pd.DataFrame(
        {
            "threads": own["threads"].astype(str),
            "base, MiB": (own["base_bytes"] / 2**20).map("{:.0f}".format),
            "bytes a described byte": own["factor"].map("{:.2f}".format),
            "error, median": own["median_error"].map(percent),
            "worst": own["worst_error"].map(percent),
            "worst of the others' mean": own["constant_error"].map(percent),
        }
    ).set_index(own["setting"])
    display(Markdown(f"**{name}**, each network predicted from the others"), shown)
    if len(predicted[predicted["campaign"] == name]):
        figure = panels.memory(predicted[predicted["campaign"] == name], f"Peak memory of a step ({name})")
        style.save(figure, folder / f"figures/memory-{name}.svg")
        display(figure)

# %% [markdown]
# The largest batch whose predicted peak fits, far beyond what was measured: a line through small batches.

# %%
largest = []
for fit in memory_fits.itertuples():
    own = sized[(sized[SETTING] == pd.Series({key: getattr(fit, key) for key in SETTING})).all(axis=1)]
    for (network, size), part in own.groupby(["network", "size"], sort=True):
        described = memory.described_bytes(networks[network, size], fit.dtype)
        batch = memory.largest_batch(memory.MemoryFit(fit.base_bytes, fit.factor), described, memory_gib * 2**30)
        largest.append(
            {key: getattr(fit, key) for key in SETTING}
            | {"network": network, "size": size, "largest_measured": part["batch"].max(), "largest_batch": batch}
        )
LARGEST = [*SETTING, "network", "size", "largest_measured", "largest_batch"]
batches = pd.DataFrame(largest, columns=LARGEST).astype({"largest_batch": "Int64"})
save(batches, "largest_batch")
for name in measured_in:
    own = batches[(batches["campaign"] == name)]
    own = own[own["threads"] == own["threads"].min()]
    if len(own):
        shown = own.pivot_table(index="setting", columns="network", values="largest_batch", aggfunc="first")
        shown = shown.map(lambda batch: "no growth seen" if pd.isna(batch) else f"{int(batch):,}".replace(",", " "))
        display(Markdown(f"**{name}**: largest batch in {memory_gib:g} GiB (modelled)"), shown)

# %% [markdown]
# ## The tail, the processor and the energy
#
# Over all steps that count. The ratio of the 95th and 99th percentile to the median says how far single steps stray;
# processor seconds a second of step, how many cores a step keeps busy. Medians over networks.

# %%
for name in measured_in:
    own = main[main["campaign"] == name]
    grouped = own.assign(p95=own["p95_s"] / own["p50_s"], p99=own["p99_s"] / own["p50_s"]).groupby("setting")
    shown = pd.DataFrame(
        {
            "networks": grouped["network"].nunique().astype(str),
            "p95 / p50": grouped["p95"].median().map("{:.2f}".format),
            "p99 / p50": grouped["p99"].median().map("{:.2f}".format),
            "busy cores": grouped["cpu_share"].median().map("{:.2f}".format),
            "first step / median": (own["first_step_s"] / own["median_s"])
            .groupby(own["setting"])
            .median()
            .map("{:.3g}".format),
        }
    )
    joules = grouped["energy_j"].median()
    if joules.notna().any():
        shown["energy of a step, J"] = joules.map(lambda value: f"{value:.3g}" if value == value else "–")
    display(Markdown(f"**{name}**"), shown)
    if joules.isna().all():
        display(Markdown("No energy was recorded: nothing on that machine could read it."))

# %% [markdown]
# ## Claims
#
# About a processor, where the published measurements were of GPUs; so an order or a ratio may differ for that reason
# alone, and the rows say so. Only committed campaigns decide.

# %%
papers = {path.stem: read_paper(path) for path in sorted((root / "data/published").glob("*.yaml"))}
claims: list[Claim] = []
DATA = "data/derived/single_device/standings.csv"
committed = main_standing[(main_standing["campaign"] != "local") & (main_standing["device"] == "cpu")]
committed = committed[committed["dtype"] == "float32"]
committed = committed.assign(family=[cases.family(name) for name in committed["framework"]])
# one campaign decides: that with the most frameworks, then the most networks
size = committed.groupby("campaign")[["family", "network"]].nunique().sort_values(["family", "network"])
committed = committed[committed["campaign"] == (size.index[-1] if len(size) else "")]


def claim(paper: str, name: str, *, holds: bool = False, in_shape: bool = False, **given: object) -> None:
    """Add the claim on figure `name` of `paper`; `given`: the other fields, a verdict only where no data decide."""
    figure = papers[paper].figure(name)
    verdict = decide(figure, holds, in_shape=in_shape)
    given["verdict"] = given.get("verdict", verdict) if figure.verified else verdict
    fixed = {"paper": paper, "figure": name, "claim": figure.text, "published": figure.value, "unit": figure.unit}
    claims.append(Claim(**({"id": name, "ours": None, "kind": "measured", "data": DATA} | fixed | given)))


def spread(network: str) -> float | None:
    """Slowest over fastest step among frameworks, each in its fastest setting; None with fewer than two."""
    best = committed[committed["network"] == network].groupby("family")["median_s"].min()
    return float(best.max() / best.min()) if len(best) > 1 else None


spreads = {network: spread(network) for network in ("alexnet", "googlenet", "resnet50", "vgg16", "fcn5", "lstm")}
for network in ("alexnet", "resnet50"):
    ours, ratio = spreads[network], papers["guolinke-2016"].figure(f"spread-{network}").value
    claim(
        "guolinke-2016",
        f"spread-{network}",
        ours=ours,
        in_shape=ours is not None and ours > 1.05,
        tolerance="in shape: ours is above 1.05; the size cannot be held against a GPU's",
        how="slowest over fastest framework, each in its fastest setting, one thread of a processor",
        why=f"a processor instead of a K40m, other versions, the quick network; published {ratio:.2f}"
        if ours
        else "no committed campaign has two frameworks on it",
        **({} if ours else {"verdict": "inconclusive"}),
    )
both = spreads["alexnet"] and spreads["resnet50"]
published_gap = papers["guolinke-2016"].figure("spread-resnet50-over-alexnet")
claim(
    "guolinke-2016",
    "spread-resnet50-over-alexnet",
    ours=spreads["resnet50"] / spreads["alexnet"] if both else None,
    holds=False,
    in_shape=bool(both) and spreads["resnet50"] > spreads["alexnet"],
    tolerance="in shape: ours is above 1",
    how="ratio of the two spreads above",
    why="many small layers leave more time between kernels than few large ones; on a processor a kernel's start costs "
    "less of a layer's time than on a GPU"
    if both
    else "no committed campaign has both networks in two frameworks",
    **({} if both else {"verdict": "inconclusive"}),
)
large, small = [spreads[name] for name in ("alexnet", "vgg16") if spreads[name]], spreads["googlenet"]
claim(
    "ssgd-2017",
    "large-kernels-differ-less",
    ours=small / max(large) if large and small else None,
    tolerance="none: the figure could not be checked",
    how="spread of GoogLeNet over the larger spread of AlexNet and VGG-16; above 1 speaks for the claim",
    why="frameworks differ by kernels, too, not by the time between them alone",
)
winners = committed[committed["standing"].isin(["fastest", "tied"])]
per_network = {network: set(part["family"]) for network, part in winners.groupby("network")}
always = set.intersection(*per_network.values()) if per_network else set()
enough = len(per_network) >= 3 and committed["family"].nunique() >= 2
claim(
    "dlbench-2016",
    "differ-by-network",
    ours=float(len(always)) if enough else None,
    unit="frameworks",
    claim="How a framework does depends on the network: frameworks that are fastest, or tied, on every network",
    holds=enough and not always,
    tolerance="holds: no framework is fastest or tied with the fastest on every network of a committed campaign",
    how="each framework in its fastest setting; ties, corrected for the number of comparisons, count as wins",
    why=(f"{', '.join(sorted(always))} is fastest or tied everywhere here" if always else "each loses somewhere")
    if enough
    else "no committed campaign has three networks in two frameworks",
    **({} if enough else {"verdict": "inconclusive"}),
)
FRAMEWORKS = ("caffe", "cntk", "mxnet", "tensorflow", "torch")
for network in ("alexnet", "resnet50"):
    for framework in FRAMEWORKS:
        claim(
            "guolinke-2016",
            f"k40m-{network}-{framework}",
            verdict="needs a GPU",
            tolerance="within 10 %",
            how="none",
            why="seconds of a K40m; its spread between frameworks is compared above",
        )
write_claims(folder / "derived/claims/single_device.json", claims)
ledger = pd.DataFrame([item.model_dump() for item in claims])
counts = "; ".join(f"{verdict}: {count}" for verdict, count in ledger["verdict"].value_counts().items())
display(Markdown(f"{len(ledger)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
