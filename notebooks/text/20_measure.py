# %% [markdown]
# # What does one training step cost on this machine?
#
# Each case is one network in one framework under one set of conditions. Every case is measured by several fresh
# processes, one per round, and the cases of a round come in random order, so that whatever drifts on the machine hits
# all of them alike. The interval is over processes, not over steps: steps of one process share its luck.
#
# Run by hand, this measures two small rounds into `data/.scratch`; the pipeline measures what `params.yaml` says.

# %% tags=["parameters"]
out: str = ""
size: str = "quick"
frameworks: list[str] = ["torch", "tensorflow"]
networks: list[str] = ["mlp", "lenet"]
batch: dict = {"mlp": 32, "lenet": 32}
dtypes: list[str] = ["float32"]
devices: list[str] = ["cpu"]
threads: list[int] = [1]
inputs: list[str] = ["sequential"]
rounds: int = 2
min_rounds: int = 2
warmups: int = 3
samples: int = 20
layer_samples: int = 3
phase_samples: int = 5
profile_rounds: int = 2
target_half_width: float = 0.02
budget_s: float = 60.0
seed: int = 1

# %%
import pandas as pd
from IPython.display import display

from steptime import measure
from steptime.core.files import project_root, read_json, validated, write_table
from steptime.core.machine import Machine
from steptime.core.statistics import case_table
from steptime.networks import build
from steptime.notebook import out_folder, progress
from steptime.report import figures, style

root = project_root()
folder = out_folder(out, "measure")
style.use()

# %% [markdown]
# ## Measuring
#
# Finished runs are kept in `data/.partial` until the campaign is whole; an interrupted measurement goes on from there.

# %%
plan = measure.Plan(
    frameworks=frameworks,
    networks=networks,
    size=size,
    batch=batch,
    dtypes=dtypes,
    devices=devices,
    threads=threads,
    inputs=inputs,
    rounds=rounds,
    min_rounds=min_rounds,
    warmups=warmups,
    samples=samples,
    layer_samples=layer_samples,
    phase_samples=phase_samples,
    profile_rounds=profile_rounds,
    target_half_width=target_half_width,
    budget_s=budget_s,
    seed=seed,
)
partial = root / ("data/.partial/measure" if out else "data/.scratch/measure.partial")
campaign = measure.measure(plan, folder / "raw", partial, report=progress)

# %% [markdown]
# ## Time of a step
#
# The geometric mean over processes of each one's median step, with its 95 % interval, without warm-ups and without
# disturbed steps. A step is called disturbed by what the system reports about it (waiting for a core, time taken by the
# hypervisor), never by its own duration. A case that this leaves with fewer than two processes keeps all its steps, and
# is marked: the disturbance was its normal condition. The last column compares the step's floating-point operations
# with what this machine's matrix product reached in the notebook before; both move with the machine's load.

# %%
CASE = ["framework", "network", "batch", "device", "threads", "input"]

machine_file = root / "data/raw/machine/machine.json"
peak_flops_per_s = validated(Machine, read_json(machine_file), machine_file).peak_flops_per_s if out else float("nan")


def step_flops(case) -> int:
    """Floating-point operations of one step of a row of `cases`."""
    network = build(case.network, size=case.size)
    return (network.forward_flops + network.backward_flops) * int(case.batch)


cases = case_table(campaign.joined()).query("processes > 1").rename(columns={"samples": "steps"})
cases["flops"] = [step_flops(case) for case in cases.itertuples()]
cases["share_of_peak"] = cases["flops"] / cases["median_s"] / peak_flops_per_s
write_table(folder / "derived/steps.csv", cases)
shown = cases.set_index(CASE)
pd.DataFrame(
    {
        "step, ms": shown["median_s"].map(lambda s: f"{s * 1e3:.3g}"),
        "95 % interval, ms": [
            f"{lo * 1e3:.3g} – {hi * 1e3:.3g}" for lo, hi in zip(shown["lo_s"], shown["hi_s"], strict=True)
        ],
        "processes": shown["processes"],
        "disturbed": [
            f"{share:.1%}" + (", all kept" if share and kept == timed else "")
            for share, kept, timed in zip(shown["disturbed_share"], shown["steps"], shown["timed_steps"], strict=True)
        ],
        "of the machine's peak": shown["share_of_peak"].map(lambda share: f"{share:.0%}" if share == share else ""),
    }
)

# %%
sequential = cases[(cases["input"] == "sequential") & (cases["threads"] == min(threads)) & (cases["device"] == "cpu")]
figure = figures.step_times(sequential)
style.save(figure, folder / "figures/step_times.svg")
figure

# %% [markdown]
# ## Where the time goes
#
# Phases are timed in steps of their own, each ending in a synchronisation, so their sum differs from a step: by a
# little on a quiet machine, by much where something disturbed them. Medians over all repetitions.

# %%
phases = (
    campaign.joined()
    .query("layer.isna() and not is_warmup and phase != 'step' and input == 'sequential' and device == 'cpu'")
    .query("threads == @threads[0]")
    .groupby(["network", "framework", "phase"], as_index=False)["time_s"]
    .median()
)
write_table(folder / "derived/phases.csv", phases)
figure = figures.phases(phases)
style.save(figure, folder / "figures/phases.svg")
figure

# %% [markdown]
# ## What was not measured, and why

# %%
missed = campaign.runs[campaign.runs["status"] != "finished"]
if missed.empty:
    print("Every case was measured.")
else:
    display(missed.set_index(CASE)[["status", "reason"]])
why = campaign.runs["stop_reason"].dropna().str.split(",").str[0].unique()
meaning = {
    "target": f"every interval is within {plan.target_half_width:.0%} of its median",
    "budget": f"the budget of {plan.budget_s:.0f} s is spent",
    "rounds": f"all {plan.rounds} rounds are done",
}
print("Measuring stopped because", "; ".join(meaning.get(reason, reason) for reason in why) + ".")
