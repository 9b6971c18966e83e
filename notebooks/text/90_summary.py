# %% [markdown]
# # What does one training step cost, and why?
#
# In which framework, on which machine, on how many of them: one sentence an answer. What the project says to others
# rests on committed campaigns and published figures; what this machine measured is shown apart, at the end.

# %% tags=["parameters"]
out: str = ""
link: str = "10gbe"
workers: int = 16

# %%
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from steptime.core.campaign import campaign_folders, repetitions
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_json, write_table
from steptime.core.step import SCHEDULES
from steptime.notebook import out_folder
from steptime.report import figures, panels, style
from steptime.report.summary import QUESTIONS

root = project_root()
folder = out_folder(out, "summary")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)
SETTING = ["device", "dtype", "threads"]


def read(stage: str, name: str) -> pd.DataFrame:
    """A table that an earlier stage derived."""
    path = root / f"data/derived/{stage}/{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: is missing; run `steptime run {stage}` (or `make study`) first")
    return pd.read_csv(path)


steps, phases, comparisons = (read("fit", name) for name in ("steps", "phases", "comparisons"))
answers_to, standing, FEW_FRAMEWORKS = read("choosing", "answers"), read("single_device", "main_standings"), 4
speed_up = read("predict", "speed_up")
published_steps, rule = (read("bcaffe", name) for name in ("published_steps", "merging"))
asked = speed_up[(speed_up["link"] == link) & (speed_up["workers"] == workers)]
if len(speed_up) and asked.empty:
    known = f"links {', '.join(speed_up['link'].unique())}; workers {sorted(speed_up['workers'].unique())}"
    raise InputError(f"summary: {link}, {workers} workers: were not predicted; there are {known}")

# %% [markdown]
# Where a campaign was measured in several settings, the answers are about one: a GPU before a CPU, then the fewest
# threads.

# %%


def span(values: pd.Series, form: str) -> str:
    """Smallest to largest value in words."""
    return " to ".join(dict.fromkeys([form.format(values.min()), form.format(values.max())]))


def main_setting(campaign: str) -> dict:
    """The device, dtype and threads that the campaign's answers are about."""
    own = steps.loc[(steps["campaign"] == campaign) & (steps["input"] == "sequential"), SETTING].drop_duplicates()
    ranked = own.assign(is_cpu=own["device"] == "cpu", other=own["dtype"] != "float32")
    return ranked.sort_values(["is_cpu", "other", "threads", "dtype"])[SETTING].iloc[0].to_dict()


def part_of(table: pd.DataFrame, campaign: str) -> pd.DataFrame:
    """The campaign's rows at its main setting, input read in sequence, one worker."""
    wanted = {"campaign": campaign, **main_setting(campaign), "input": "sequential"}
    for name, value in wanted.items():
        if name in table.columns:
            table = table[table[name] == value]
    return table


def where(campaign: str) -> str:
    """The campaign and its main setting in words."""
    chosen = main_setting(campaign)
    return f"{campaign}: {chosen['device']}, {chosen['threads']} thread{'s' if chosen['threads'] > 1 else ''}"


def has_many(campaign: str) -> bool:
    """More settings than a table with a column each can hold, or several batches of a network."""
    own = part_of(steps, campaign)
    return own["framework"].nunique() > FEW_FRAMEWORKS or bool(own.duplicated(["framework", "network"]).any())


def which_setting(campaign: str) -> str:
    """Which of many settings is fastest, alone or tied, on which networks."""
    own = answers_to[answers_to["campaign"] == campaign]
    ahead = own.groupby("fastest", sort=False)["network"].agg(", ".join)
    said = "; ".join(f"{name} on {networks}" for name, networks in ahead.items())
    apart = own["next_ratio"].dropna()
    further = f" The next that can be told apart takes {span(apart, '{:.2f}')} times as long" if len(apart) else ""
    compared = standing[standing["campaign"] == campaign].groupby("network")["setting"].nunique()
    of = f"of the {span(compared, '{}')} settings that could be compared on a network"
    lead = f"No setting is the fastest everywhere: {of}, it is" if len(ahead) > 1 else f"The fastest, {of}, is"
    return (
        f"{lead} {said}; the table names those tied with it.{further} "
        f"({where(campaign)}; measured, paired by round, corrected for the number of comparisons)."
    )


def what_limits(campaign: str) -> str:
    """How much of the fastest settings' steps the machine's peaks explain."""
    own = answers_to[(answers_to["campaign"] == campaign)].dropna(subset=["rest_share"])
    of = {part: span(own[f"{part}_share"], "{:.0%}") for part in ("arithmetic", "memory", "rest")}
    return (
        f"The arithmetic of the fastest setting's step would take {of['arithmetic']} of it at this machine's peak, and "
        f"what is bound by memory {of['memory']}; the rest, {of['rest']}, is kernels below the peaks and time between "
        f"kernels ({', '.join(own['network'])}; {where(campaign)}; measured)."
    )


def which_framework(campaign: str) -> str:
    """Which framework is faster, on how many networks, by how much."""
    if has_many(campaign):
        return which_setting(campaign)
    pairs = part_of(comparisons, campaign)
    if pairs.empty:
        return f"No two frameworks were measured ({where(campaign)})."
    apart = pairs[pairs["different"]]
    said = [
        f"{name} is faster on {', '.join(won['network'])} (by {span(won['ratio'], '{:.2f}')} times)"
        for name, won in apart.groupby("faster")
    ]
    equal = ", ".join(pairs.loc[~pairs["different"], "network"])
    if equal:
        said.append(f"no difference can be told on {equal}")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]} ({where(campaign)}; measured, paired by round)."


def where_time_goes(campaign: str) -> str:
    """The share of backward, forward and reading in a step."""
    part = part_of(phases, campaign)
    shares = part["time_s"] / part.groupby("case_id")["time_s"].transform("sum")
    of = {phase: span(shares[part["phase"] == phase], "{:.0%}") for phase in ("backward", "forward", "io")}
    return (
        f"Backward takes {of['backward']} of a step, forward {of['forward']}, reading the input {of['io']} "
        f"({where(campaign)}; measured)."
    )


def many_workers(campaign: str) -> str:
    """The modelled speed-up of each schedule."""
    part = part_of(asked, campaign)
    said = {name: span(part.loc[part["schedule"] == name, "speed_up"], "{:.3g}") for name in SCHEDULES}
    return (
        f"{workers} such machines on {link} would be {said['merged']} times as fast as one with merged gradients, "
        f"{said['wait_free']} times with one message a layer, {said['end_of_backward']} times with one message after "
        f"backward ({where(campaign)}; modelled)."
    )


def answers_of(campaign: str) -> list[dict]:
    """The campaign's answers that its tables allow, each with the question that it answers."""
    found = [("device", which_framework(campaign))]
    if len(part_of(phases, campaign)):
        found.append(("device", where_time_goes(campaign)))
    if answers_to.loc[answers_to["campaign"] == campaign, "rest_share"].notna().any():
        found.append(("device", what_limits(campaign)))
    if len(part_of(asked, campaign)):
        found.append(("predicted", many_workers(campaign)))
    return [{"question": question, "text": text, "figure": None} for question, text in found]


def many_table(campaigns: list[str]) -> pd.DataFrame:
    """One row a network (and campaign): the fastest of many settings, what is tied with it, and the next."""
    own = answers_to[answers_to["campaign"].isin(campaigns)]
    text = {name: own[name].where(own[name].notna(), "–") for name in ("tied", "next")}
    table = pd.DataFrame(
        {
            "campaign": own["campaign"],
            "network": own["network"],
            "batch": own["batch"],
            "fastest": own["fastest"],
            "step_s": own["median_s"],
            "tied with it": text["tied"],
            "next": text["next"],
            "times as long": own["next_ratio"].round(3),
        }
    ).reset_index(drop=True)
    return table if len(campaigns) > 1 else table.drop(columns="campaign")


def headline_table(campaigns: list[str]) -> pd.DataFrame:
    """One row a network (and campaign): step time in each framework, which is faster, modelled speed-up of that one."""
    rows = []
    if any(has_many(campaign) for campaign in campaigns):
        return many_table(campaigns)
    for campaign in campaigns:
        part = part_of(steps, campaign)
        for (network, batch), of_network in part.groupby(["network", "batch"], sort=False):
            best = of_network.loc[of_network["median_s"].idxmin(), "framework"]
            pairs = part_of(comparisons, campaign)
            pairs = pairs[(pairs["network"] == network) & (pairs["batch"] == batch)]
            predicted = part_of(asked, campaign).query(
                "network == @network and batch == @batch and framework == @best and schedule == 'merged'"
            )
            rows.append(
                {"campaign": campaign, "network": network, "batch": int(batch)}
                | {f"{row.framework}_s": row.median_s for row in of_network.itertuples()}
                | {
                    "faster": best if len(pairs) and pairs["different"].all() else "–",
                    f"speed-up, {workers} workers (modelled)": (
                        float(predicted["speed_up"].iloc[0]) if len(predicted) else None
                    ),
                }
            )
    table = pd.DataFrame(rows)
    return table if len(campaigns) > 1 else table.drop(columns="campaign")


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with times in ms, three digits."""
    shown = table.astype(object).copy()
    for name in table.columns:
        if name == "times as long":
            shown[name] = table[name].map(lambda value: "–" if pd.isna(value) else f"{value:.3g}")
        elif name.endswith("_s"):
            shown[name] = (1e3 * table[name]).map(lambda ms: f"{ms:.3g}")
        elif name.startswith("speed-up"):
            shown[name] = table[name].map(lambda value: "–" if pd.isna(value) else f"{value:.3g}")
    return shown.rename(columns={name: f"{name[:-2]}, ms" for name in table.columns if name.endswith("_s")})


def draw(campaigns: list[str], title: str) -> Figure:
    """Step times of the campaigns' main settings; of many settings, how they stand to the fastest of each network."""
    many = any(has_many(campaign) for campaign in campaigns)
    parts = [standing[standing["campaign"] == name] if many else part_of(steps, name) for name in campaigns]
    if len(campaigns) > 1:
        parts = [part.assign(network=part["network"] + ", " + part["campaign"]) for part in parts]
    table = pd.concat(parts)
    return panels.standings(table, title) if many else figures.step_times(table, title)


def draw_speed_up(campaign: str) -> Figure:
    """Modelled speed-up of the framework named first, at the link asked for."""
    part = part_of(speed_up, campaign)
    part = part[(part["link"] == link) & (part["framework"] == sorted(part["framework"])[0])]
    return figures.speed_up(part, title=f"Speed-up, modelled: {link}, {part['framework'].iloc[0]} ({campaign})")


def named(tables: pd.DataFrame) -> list[str]:
    """Campaigns in the table, sorted."""
    return sorted(tables["campaign"].unique())


# %% [markdown]
# ## Committed campaigns and published figures
#
# A campaign of one network is a sweep of its conditions: the study of scripts shows it, the answers here leave it out
# where there is a broader one. One that repeats another's plan says how well the two agree.

# %%
repeated = repetitions(campaign_folders(root))
recorded = named(steps[(steps["campaign"] != "local") & (steps["input"] == "sequential")])
firsts = [name for name in recorded if name not in repeated]
broad = [name for name in firsts if steps.loc[steps["campaign"] == name, "network"].nunique() > 1]
committed = broad or firsts
answers: list[dict] = []
for campaign in committed:
    answers += answers_of(campaign)
    answers[0]["figure"] = "headline.svg"
    if len(part_of(asked, campaign)):
        answers[-1]["figure"] = f"speed-up-{campaign}.svg"
        style.save(draw_speed_up(campaign), folder / f"figures/speed-up-{campaign}.svg")

agreement = read("single_device", "agreement").set_index(["first", "second"])
for again, first in repeated.items():
    if (first, again) in agreement.index:
        pair = agreement.loc[(first, again)]
        text = (
            f"Of {pair['in_both']:.0f} pairs of settings that {first} calls different, {again}, the same plan measured "
        )
        text += f"once more, puts {pair['agreeing']:.0f} in the same order (measured)."
        answers.append({"question": "device", "text": text, "figure": None})

line = published_steps[published_steps["how"] == "line through the log"]
bench = published_steps.loc[published_steps["how"] == "all-reduce benchmark", "error"]
curves = pd.concat(
    [
        line.assign(kind="modelled"),
        line.assign(kind="measured", speed_up=line["measured_speed_up"]),
    ]
).rename(columns={"nodes": "workers"})
style.save(
    figures.speed_up(curves, panel=None, title="GoogLeNet on K80 nodes: speed-up, measured (published) and modelled"),
    folder / "figures/published.svg",
)
answers += [
    {
        "question": "measured",
        "text": "A line through the all-reduce times of one schedule's published log (wait-free) predicts the "
        f"published steps of that schedule and two others on {span(line['nodes'], '{}')} K80 nodes to within "
        f"{span(line['error'], '{:+.1%}')}; an independent all-reduce benchmark, to within {span(bench, '{:+.1%}')} "
        "(modelled).",
        "figure": "published.svg",
    },
    {
        "question": "predicted",
        "text": f"The published rule for merging gradients is up to {rule['rule_above_optimum'].max():.0%} slower than "
        "the best grouping, where backward does not hide the communication (modelled).",
        "figure": None,
    },
]
held = read("predicted_measured", "cells")
held = held[(held["engine"] == "torch_gloo") & ~held["is_fitted"].astype(bool) & ~held["is_cpu_bound"].astype(bool)]
if len(held):
    errors = held["error"].abs()
    schedules = held["schedule"].str.partition("=")[0].nunique()
    answers.append(
        {
            "question": "measured",
            "text": f"Fitted on the steps of one and two workers, the model predicts those of "
            f"{span(held['workers'], '{}')} workers to within {errors.median():.1%} in the median and "
            f"{errors.quantile(0.9):.0%} in nine cells of ten ({len(held)} cells, {schedules} schedules, "
            f"{', '.join(sorted(held['network'].unique()))}, links of "
            f"{span(held['rate_bits_per_s'] / 1e6, '{:g}')} Mbit/s; emulated compute, real communication).",
            "figure": None,
        }
    )
for question in QUESTIONS:
    told = [answer["text"] for answer in answers if answer["question"] == question.key]
    display(Markdown(f"**{question.text}**\n\n" + "\n".join(f"* {text}" for text in told or ["No answer yet."])))

# %%
headline = None
STEPS = "Median step with its 95 % interval over processes, measured"
STANDINGS = "Step time over that of the fastest setting of each network (its time beside it), measured ({})."
if any(has_many(campaign) for campaign in committed):
    CAPTION = STANDINGS
else:
    CAPTION = (
        STEPS + f"; speed-up of the framework with the smaller median over {link}, merged gradients, modelled ({{}})."
    )
if committed:
    figure = draw(committed, "Time of one training step, measured")
    style.save(figure, folder / "figures/headline.svg")
    table = headline_table(committed)
    write_table(folder / "derived/headline.csv", table)
    headline = {
        "figure": "headline.svg",
        "caption": CAPTION.format("; ".join(map(where, committed))),
        "columns": list(table.columns),
        "table": table.astype(object).where(table.notna(), None).to_dict("records"),
    }
    display(figure, readable(table))
else:
    display(Markdown("No campaign is committed yet: `steptime campaign add NAME` makes one part of the study."))
write_json(
    folder / "derived/summary.json",
    {
        "question": "What does one training step cost, in which framework, on which machine, on how many, and why?",
        "answers": answers,
        "headline": headline,
        "campaigns": recorded,
    },
)

# %% [markdown]
# The same numbers for `dvc metrics diff` and `dvc plots diff`: of each campaign's networks the fastest step (measured)
# and, where there is a layer profile, the largest speed-up (modelled, merged gradients).

# %%
fastest, metrics = [], {"speed_up_of_workers": workers}
for campaign in [*committed, *(["local"] if "local" in named(steps) else [])]:
    ahead = part_of(steps, campaign).groupby("network")["median_s"].min()
    of = part_of(asked, campaign)
    gain = of[of["schedule"] == "merged"].groupby("network")["speed_up"].max()
    metrics[campaign] = {
        "fastest_step_ms": {network: round(1e3 * seconds, 4) for network, seconds in ahead.items()},
        "speed_up": {network: round(value, 3) for network, value in gain.items()},
    }
    fastest += [{"case": f"{network}, {campaign}", "step_ms": 1e3 * seconds} for network, seconds in ahead.items()]
write_json(folder / "derived/metrics.json", metrics)
write_table(folder / "derived/fastest.csv", pd.DataFrame(fastest, columns=["case", "step_ms"]))

# %% [markdown]
# ## This machine
#
# Not part of the study: what was measured where this page was made.

# %%
if "local" in set(steps.loc[steps["input"] == "sequential", "campaign"]):
    figure = draw(["local"], "Time of one training step, measured (this machine)")
    style.save(figure, folder / "figures/local.svg")
    table = headline_table(["local"])
    write_table(folder / "derived/local.csv", table)
    told = [answer["text"] for answer in answers_of("local")]
    write_json(
        folder / "derived/local.json",
        {
            "answers": told,
            "figure": "local.svg",
            "caption": (STANDINGS if has_many("local") else STEPS + " ({}).").format(where("local")),
            "columns": list(table.columns),
            "table": table.astype(object).where(table.notna(), None).to_dict("records"),
        },
    )
    display(Markdown("\n".join(f"{place}. {text}" for place, text in enumerate(told, start=1))))
    display(figure, readable(table))
else:
    display(Markdown("This machine has not been measured: `steptime run measure`."))
