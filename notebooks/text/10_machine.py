# %% [markdown]
# # What can this machine do at most?
#
# Two figures bound every training step on a machine: how many floating-point operations it finishes in a second, and
# how many bytes it moves. This notebook measures both on the simplest loads there are, a large matrix product and a
# large copy, and says which machine and which frameworks the timings of the next notebook belong to.

# %% tags=["parameters"]
out: str = ""
threads: int = 1
seconds: float = 1.0

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import NullFormatter

from steptime import measure, networks
from steptime.core.files import project_root, write_json
from steptime.core.machine import Machine
from steptime.measure.provenance import machine_facts
from steptime.notebook import out_folder
from steptime.report import style

root = project_root()
folder = out_folder(out, "machine")
style.use()

# %% [markdown]
# ## The machine and its frameworks
#
# These fingerprints are dependencies of the pipeline: when one of them changes, `dvc repro` measures again. Cores are
# those that a process may use (affinity and cgroup quota), not those that the processor has.

# %%
fingerprints = measure.fingerprints()
facts = fingerprints.pop("machine")
facts["gpus"] = ", ".join(facts["gpus"]) or "none"
pd.Series(facts, name="").to_frame()

# %%
table = pd.DataFrame(fingerprints.values()).set_index("framework")
table["devices"] = table["devices"].str.join(", ")
table

# %% [markdown]
# ## What it reaches
#
# Medians over repetitions that alternate the two loads, so that both see the same minutes of the machine.

# %%
reached = measure.peaks(threads, seconds)
facts = machine_facts()
machine = Machine(
    name="local",
    device=facts["cpu_model"],
    cores=threads,
    memory_bytes=facts["memory_bytes"],
    peak_flops_per_s=reached["peak_flops_per_s"],
    memory_bytes_per_s=reached["memory_bytes_per_s"],
    source=(
        f"measured: float32 product of two {reached['matrix_order']} x {reached['matrix_order']} matrices and a copy "
        f"of {reached['copy_bytes'] / 2**20:.0f} MiB, {threads} thread(s), median of {reached['rounds']} repetitions"
    ),
)
write_json(folder / "raw/machine.json", machine.model_dump())
balance = machine.peak_flops_per_s / machine.memory_bytes_per_s
pd.Series(
    {
        "float32 matrix product, GFLOP/s": f"{machine.peak_flops_per_s / 1e9:.4g}",
        "copy, read and write, GB/s": f"{machine.memory_bytes_per_s / 1e9:.4g}",
        "operations per byte at which the two balance": f"{balance:.3g}",
        "resolution of the clock, ns": f"{reached['timer_resolution_s'] * 1e9:.3g}",
        "threads": str(threads),
    },
    name="",
).to_frame()

# %% [markdown]
# ## Which layers the memory bounds
#
# A layer that does fewer operations per byte than the machine's balance cannot reach the processor's peak, however well
# it is written. The dots are the forward passes of the layers of our networks (quick size, batch 16): operations
# over the bytes of weights, inputs and outputs, each counted once. The dots are counted, the line is measured.

# %%
BATCH = 16


def intensity(layer) -> float:
    """Forward operations per byte of weights, inputs and outputs in float32."""
    values = layer.parameter_count + BATCH * (layer.activation_count + sum(map(np.prod, layer.in_shapes)))
    return BATCH * layer.forward_flops / (4 * values)


figure, (roof, strip) = plt.subplots(2, 1, sharex=True, figsize=(7.2, 6.0), height_ratios=[1, 1])
x = np.geomspace(0.05, 500, 200)
roof.plot(x, np.minimum(x * machine.memory_bytes_per_s, machine.peak_flops_per_s) / 1e9, color=style.colour("ink"))
roof.set(xscale="log", yscale="log", ylabel="GFLOP/s at most")
roof.yaxis.set_minor_formatter(NullFormatter())
roof.set_title("Roofline of this machine, and where the layers lie under it")
for row, name in enumerate(networks.NAMES):
    layers = [layer for layer in networks.build(name, "quick").layers if layer.forward_flops]
    strip.plot([intensity(layer) for layer in layers], [row] * len(layers), "o", markersize=4, alpha=0.6)
strip.set(ylim=(len(networks.NAMES) - 0.5, -0.5), xlabel="operations per byte (logarithmic)")
strip.set_yticks(range(len(networks.NAMES)), networks.NAMES)
for axes in (roof, strip):
    axes.axvline(balance, color=style.colour("muted"), linestyle=":")
style.save(figure, folder / "figures/roofline.svg")
