# %% [markdown]
# # How much faster is a GPU, and for which networks?
#
# The same setting, network, batch and type on a processor and on a GPU of the same campaign, with the most threads on
# the processor. A GPU needs enough work at a time to pay for starting it: the speed-up should grow with the batch, and
# depth, many small layers one after the other, should cost it more than width.

# %% tags=["parameters"]
out: str = ""

# %%
import math

import pandas as pd
from IPython.display import Markdown, display

from steptime.core.claims import Claim, decide, read_paper, write_claims
from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.networks import build
from steptime.notebook import out_folder
from steptime.report import panels, style

root = project_root()
folder = out_folder(out, "cpu_vs_gpu")
style.use()
pd.set_option("display.max_colwidth", None, "display.max_rows", None)


def save(table: pd.DataFrame, name: str) -> None:
    """Write a derived table, the same numbers to the same bytes."""
    write_table(folder / f"derived/{name}.csv", table)


path = root / "data/derived/single_device/cases.csv"
if not path.is_file():
    raise InputError(f"{path}: is missing; run `steptime run single_device` (or `make study`) first")
every = pd.read_csv(path)

# %% [markdown]
# ## Speed-up
#
# Step on the processor over step on the GPU; depth is the number of layers with parameters.

# %%
PAIR = ["campaign", "framework", "network", "size", "batch", "dtype", "workers", "input"]
COLUMNS = [*PAIR, "setting", "cpu_threads", "depth", "cpu_s", "gpu_s", "speed_up", "lo", "hi"]


def speed_ups(table: pd.DataFrame) -> pd.DataFrame:
    """One row a case that was measured on both; `lo` and `hi` bound the ratio when both medians are at their ends."""
    rows = []
    for _, part in table.groupby(PAIR, sort=True):
        of = dict(list(part.groupby("device")))
        if not {"cpu", "cuda"} <= set(of):
            continue
        cpu, gpu = of["cpu"].loc[of["cpu"]["threads"].idxmax()], of["cuda"].loc[of["cuda"]["median_s"].idxmin()]
        network = build(cpu["network"], size=cpu["size"])
        rows.append(
            cpu[[*PAIR, "setting"]].to_dict()
            | {"cpu_threads": cpu["threads"], "depth": sum(bool(layer.parameters) for layer in network.layers)}
            | {"cpu_s": cpu["median_s"], "gpu_s": gpu["median_s"], "speed_up": cpu["median_s"] / gpu["median_s"]}
            | {"lo": cpu["lo_s"] / gpu["hi_s"], "hi": cpu["hi_s"] / gpu["lo_s"]}
        )
    return pd.DataFrame(rows, columns=COLUMNS)


both = speed_ups(every)
save(both, "speed_up")
if both.empty:
    recorded = ", ".join(sorted(every["device"].unique())) or "none"
    display(
        Markdown(
            f"No campaign has the same case on a processor and on a GPU (devices recorded: {recorded}). On a machine "
            "with a GPU, `steptime run measure` measures both, as `params.yaml` names both devices."
        )
    )
else:
    shown = both[both["input"] == "sequential"].sort_values(["campaign", "network", "setting", "batch"])
    table = shown[["campaign", "network", "depth", "setting", "batch"]].assign(
        **{
            "processor, ms": (1e3 * shown["cpu_s"]).map("{:.3g}".format),
            "GPU, ms": (1e3 * shown["gpu_s"]).map("{:.3g}".format),
            "speed-up": shown["speed_up"].map("{:.3g}".format),
            "interval": [f"{row.lo:.3g} to {row.hi:.3g}" for row in shown.itertuples()],
        }
    )
    display(table.set_index(["campaign", "network"]))

# %% [markdown]
# ## Against batch and depth

# %%


def per_doubling(own: pd.DataFrame) -> float | None:
    """The typical factor by which the speed-up grows when the batch doubles; None without two batches of a case."""
    factors = []
    for _, part in own.groupby(["framework", "network", "size", "dtype", "input"]):
        part = part.sort_values("batch")
        first, last = part.iloc[0], part.iloc[-1]
        if last["batch"] > first["batch"]:
            doublings = math.log2(last["batch"] / first["batch"])
            factors.append((last["speed_up"] / first["speed_up"]) ** (1 / doublings))
    return float(pd.Series(factors).median()) if factors else None


if both.empty:
    display(Markdown("No campaign has a case on both: nothing is measured here yet."))
for name, own in both[both["input"] == "sequential"].groupby("campaign"):
    labels = ("samples a batch", "speed-up over the processor")
    figure = panels.scaling(own, "batch", "speed_up", labels, f"GPU over processor, measured ({name})")
    style.save(figure, folder / f"figures/speed-up-{name}.svg")
    display(figure)
    growth = per_doubling(own)
    largest = own.sort_values("batch").groupby(["network", "setting"]).tail(1)
    depth = largest.groupby("network").agg(depth=("depth", "first"), speed_up=("speed_up", "median"))
    order = ", ".join(
        f"{row.Index} ({row.depth}) {row.speed_up:.3g}" for row in depth.sort_values("depth").itertuples()
    )
    said = f"Doubling the batch multiplies the speed-up by {growth:.2f} (median). " if growth else ""
    display(Markdown(f"**{name}**: {said}At the largest batch, by depth (layers with parameters): {order}."))

# %% [markdown]
# ## Claims
#
# Only committed campaigns decide.

# %%
papers = {path.stem: read_paper(path) for path in sorted((root / "data/published").glob("*.yaml"))}
committed = both[(both["campaign"] != "local") & (both["input"] == "sequential") & (both["dtype"] == "float32")]
growth = per_doubling(committed)
by_network = committed.groupby("network")["speed_up"].median()
has_gpu = not committed.empty
NO_GPU = "no committed campaign has a GPU"
paper = papers["dlbench-2016"]
DATA = "data/derived/cpu_vs_gpu/speed_up.csv"


def claim(name: str, figure: str, is_known: bool, holds: bool, **given: object) -> Claim:
    """A claim on a figure of the paper; without a GPU nothing decides it, and its own figure is left out."""
    source = paper.figure(figure)
    verdict = decide(source, holds) if is_known else "needs a GPU"
    fixed = {"id": name, "paper": paper.id, "figure": figure, "published": source.value, "unit": "times"}
    return Claim(**(fixed | {"kind": "measured", "data": DATA, "verdict": verdict} | given))


claims = [
    claim(
        "gpu-faster",
        "gpu-faster",
        has_gpu,
        False,
        claim=paper.figure("gpu-faster").text,
        ours=float(committed["speed_up"].median()) if has_gpu else None,
        ours_lo=float(committed["speed_up"].min()) if has_gpu else None,
        ours_hi=float(committed["speed_up"].max()) if has_gpu else None,
        tolerance="none: the figure could not be checked",
        how="step on the processor over step on the GPU, the same case; median, smallest, largest",
        why=f"{len(committed)} cases" if has_gpu else NO_GPU,
    ),
    claim(
        "gpu-speed-up-differs",
        "differ-by-network",
        len(by_network) > 1,
        len(by_network) > 1 and by_network.max() / by_network.min() > 1.2,
        claim="What a GPU gains depends on the network: largest over smallest speed-up",
        ours=float(by_network.max() / by_network.min()) if len(by_network) > 1 else None,
        tolerance="holds: above 1.2",
        how="median speed-up of each network over settings and batches",
        why=", ".join(f"{network} {gain:.3g}" for network, gain in by_network.items()) or NO_GPU,
    ),
    claim(
        "gpu-gains-with-batch",
        "differ-by-network",
        growth is not None,
        growth is not None and growth > 1.0,
        claim="What a GPU gains depends on the work: growth of its speed-up when the batch doubles",
        ours=growth,
        tolerance="holds: above 1",
        how="speed-up at the largest over speed-up at the smallest batch, a doubling; median over cases",
        why="the larger the batch, the more work each kernel has" if growth else NO_GPU,
    ),
]
write_claims(folder / "derived/claims/cpu_vs_gpu.json", claims)
counts = "; ".join(f"{claim.id}: {claim.verdict}" for claim in claims)
display(Markdown(f"{len(claims)} claims. {counts}. The [ledger](claims.html) lists each with its reason."))
