# %% [markdown]
# # What is a step made of?
#
# Each measured case becomes what the models take in: its step time with an interval, the seconds of its phases, and a
# layer profile. What the parts do not explain of the whole is told, not spread.
#
# Phases, in the words of the S-SGD papers: reading and decoding a batch $t_{io}$, copying it to the device $t_{h2d}$,
# forward $t_f$, backward $t_b$, update $t_u$. A step that does one after the other takes
#
# $$t = t_{io} + t_{h2d} + t_f + t_b + t_u$$

# %% tags=["parameters"]
out: str = ""

# %%
import pandas as pd
from IPython.display import Markdown, display

from steptime.core.campaign import Campaign, read_campaign
from steptime.core.files import project_root, write_table
from steptime.core.statistics import CASE, case_table, comparisons, usable
from steptime.model.fitting import layer_profile, pass_fits, phase_medians, profile_cases
from steptime.networks import build
from steptime.notebook import campaign_folders, out_folder
from steptime.report import figures, panels, style

root = project_root()
folder = out_folder(out, "fit")
style.use()


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


campaigns = {name: read_campaign(path) for name, path in campaign_folders(root).items()}
if not campaigns:
    display(Markdown("No campaign is there yet: `steptime run measure` makes one of this machine."))

# %% [markdown]
# ## Step times
#
# The estimate is the geometric mean over processes of each one's median step, with a 95 % interval over processes.
# Warm-ups are left out; so are steps that something outside the process disturbed, by a rule that never looks at the
# step's own duration. A case that this leaves with fewer than two processes keeps all its steps. Few processes make a
# wide interval: with two, Student's factor is 12.7.

# %%
STEP_COLUMNS = ["campaign", "case_id", *CASE, "median_s", "lo_s", "hi_s", "processes", "samples", "disturbed_share"]

tables = [case_table(campaign.joined()).assign(campaign=name) for name, campaign in campaigns.items()]
steps = pd.concat(tables)[STEP_COLUMNS].query("processes > 1") if tables else pd.DataFrame(columns=STEP_COLUMNS)
save(steps, "steps")

for name, part in steps.groupby("campaign"):
    every = campaigns[name].joined().query("phase == 'step' and not is_warmup")
    display(
        Markdown(
            f"**{name}**: {len(part)} cases, {len(every)} timed steps in {every['run_id'].nunique()} processes; "
            f"{every['is_disturbed'].mean():.1%} of the steps were disturbed, at most "
            f"{part['disturbed_share'].max():.1%} of one case."
        )
    )

# %%
alone = steps[(steps["input"] == "sequential") & (steps["workers"] == 1)]
SETTING = ["campaign", "device", "dtype", "threads"]
FEW_FRAMEWORKS = 4


def named(kind: str, setting: tuple) -> str:
    """The file of a figure of one setting."""
    campaign, device, dtype, threads = setting
    return f"figures/{kind}-{campaign}-{device}-{dtype}-t{threads}.svg"


def words(setting: tuple) -> str:
    campaign, device, dtype, threads = setting
    return f"{campaign}, {device}, {dtype}, {threads} thread{'s' if threads > 1 else ''}"


def few(part: pd.DataFrame) -> bool:
    """Few enough cases for a figure that has all of them side by side; page 50 compares many settings."""
    return part["framework"].nunique() <= FEW_FRAMEWORKS and not part.duplicated(["framework", "network"]).any()


for setting, part in alone.groupby(SETTING):
    if not few(part):
        counts = part.groupby("network")["framework"].nunique()
        span = " to ".join(dict.fromkeys([str(counts.min()), str(counts.max())]))
        text = f"{words(setting)}: {span} settings a network, compared in [Which framework](50_single_device.ipynb)."
        display(Markdown(text))
        continue
    figure = figures.step_times(part, f"Time of one training step, measured ({words(setting)})")
    style.save(figure, folder / named("step-times", setting))
    display(figure)

# %% [markdown]
# ## Which framework is faster
#
# Paired by round, and corrected for the number of pairs asked about (Holm): under one set of conditions the chance of
# calling any two equal frameworks different is 5 %. Fewer than three common rounds are not compared.

# %%
FEWEST_ROUNDS = 3
PAIR = ["network", "size", "batch", "dtype", "device", "threads", "input"]
COMPARISON_COLUMNS = ["campaign", *PAIR, "slower", "faster", "ratio", "lo", "hi", "p_value", "different"]


def comparison_rows(name: str) -> list[dict]:
    """One row a pair of frameworks that ran the same case in at least three common rounds."""
    rows = []
    for case, part in usable(campaigns[name].joined()).groupby(PAIR):
        if part["framework"].nunique() > 1:
            pairs = comparisons(part, by="framework").query("rounds >= @FEWEST_ROUNDS")
            rows += pairs.assign(campaign=name, **dict(zip(PAIR, case, strict=True))).to_dict("records")
    return rows


compared = pd.DataFrame([row for name in campaigns for row in comparison_rows(name)], columns=COMPARISON_COLUMNS)
save(compared, "comparisons")
in_sequence = compared[compared["input"] == "sequential"]
for setting, part in in_sequence.groupby(SETTING):
    if part["slower"].nunique() >= FEW_FRAMEWORKS:
        continue
    shown = part[["network", "batch", "faster", "slower"]].copy()
    shown["slower takes, times as long"] = part["ratio"].map("{:.3g}".format)
    shown["interval"] = [f"{row.lo:.3g} to {row.hi:.3g}" for row in part.itertuples()]
    shown["told apart"] = part["different"].map({True: "yes", False: "no"})
    shown = shown.sort_values(["network", "batch"], kind="stable").reset_index(drop=True)
    display(Markdown(f"**{words(setting)}**"), shown)

# %% [markdown]
# ## Where the time goes
#
# Phases are timed in steps of their own that end each phase with a synchronisation. So a bar's number is the sum of its
# phases, not the step time above: it can exceed it, and the lines below the figures say by how much.

# %%
profiled = {name: profile_cases(campaign) for name, campaign in campaigns.items()}


def by_case(campaign: Campaign) -> dict[str, Campaign]:
    """The campaign's cases, each as a campaign of its own: looking one up is then quick."""
    case_of = campaign.samples["run_id"].map(campaign.runs.set_index("run_id")["case_id"])
    samples = dict(list(campaign.samples.groupby(case_of)))
    runs = campaign.runs.groupby("case_id")
    return {case_id: Campaign(campaign.name, part, samples[case_id]) for case_id, part in runs if case_id in samples}


case_campaigns = {name: by_case(campaign) for name, campaign in campaigns.items()}
phases = pd.DataFrame(
    [
        {"campaign": name, "case_id": case.case_id, **{key: getattr(case, key) for key in CASE}}
        | {"phase": phase, "time_s": seconds}
        for name, cases in profiled.items()
        for case in cases.itertuples()
        for phase, seconds in phase_medians(case_campaigns[name][case.case_id], case.case_id).items()
    ],
    columns=["campaign", "case_id", *CASE, "phase", "time_s"],
)
save(phases, "phases")

for setting, part in phases[phases["workers"] == 1].groupby(SETTING):
    batches = part.groupby("network")["batch"].transform("max")
    part = part[part["batch"] == batches].assign(setting=part["framework"])
    part["part"] = part["phase"].map(figures.PHASE_LABELS)
    title = f"Where the step's time goes, measured ({words(setting)})"
    figure = panels.stacked(part, panels.PHASE_COLOURS, title, "sum of the phases, ms")
    style.save(figure, folder / named("phases", setting))
    display(figure)

# %%
total = phases.groupby(["campaign", "case_id"])["time_s"].sum().rename("phases_s")
share = phases.join(total, on=["campaign", "case_id"])
share["share"] = share["time_s"] / share["phases_s"]
sums = steps.merge(total, on=["campaign", "case_id"])
for setting, part in share.groupby(SETTING):
    backward, reading = (part[part["phase"] == phase]["share"] for phase in ("backward", "io"))
    same = sums[(sums[SETTING] == pd.Series(setting, SETTING)).all(axis=1)]
    over = same["phases_s"] / same["median_s"] - 1
    display(
        Markdown(
            f"{words(setting)}: backward takes {backward.min():.0%} to {backward.max():.0%} of a step, reading the "
            f"input {reading.min():.1%} to {reading.max():.1%}. The phases' sum lies {over.min():+.1%} to "
            f"{over.max():+.1%} off the whole step."
        )
    )

# %% [markdown]
# ## Layer profiles
#
# Timing a layer on its own costs a synchronisation and keeps it from being fused with its neighbours. So the layers
# give the *shares*, the passes timed in one piece the seconds: the layer times are scaled to add up to $t_f$ and
# $t_b$. The scale is the part that the layers do not explain; far from 1, believe the shares less.

# %%
layer_tables, fit_rows = [], []
for name, cases in profiled.items():
    for case in cases.itertuples():
        network = build(case.network, size=case.size)
        profile = layer_profile(case_campaigns[name][case.case_id], network, case.case_id)
        table = pd.DataFrame({"campaign": name, "case_id": case.case_id, "layer": profile.layers})
        for column in ("forward_s", "backward_s"):
            table[column] = getattr(profile, column)
        for column in ("parameter_bytes", "activation_bytes"):
            table[column] = getattr(profile, column).astype(int)
        layer_tables.append(table)
        fit_rows += [
            {"campaign": name, "case_id": case.case_id, "framework": case.framework, "network": case.network}
            | {"pass": key, **vars(fit), "scale": fit.scale, "unexplained": fit.unexplained}
            for key, fit in pass_fits(case_campaigns[name][case.case_id], network, case.case_id).items()
        ]
LAYER_COLUMNS = ["campaign", "case_id", "layer", "forward_s", "backward_s", "parameter_bytes", "activation_bytes"]
FIT_COLUMNS = ["campaign", "case_id", "framework", "network", "pass", "whole_s", "layers_s", "scale", "unexplained"]
layers = pd.concat(layer_tables) if layer_tables else pd.DataFrame(columns=LAYER_COLUMNS)
fits = pd.DataFrame(fit_rows, columns=FIT_COLUMNS)
save(layers[LAYER_COLUMNS], "layers")
save(fits, "fits")
shown = fits.assign(**{"scale of layer times": fits["scale"].map(lambda scale: f"{scale:.2f}")})
shown.pivot_table(
    index=["campaign", "network", "framework", "case_id"],
    columns="pass",
    values="scale of layer times",
    aggfunc="first",
)
