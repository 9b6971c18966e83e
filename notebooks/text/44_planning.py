# %% [markdown]
# # What would your cluster bring?
#
# A plan is a network as it was measured on one device, a link, a number of workers and a schedule. What follows is
# modelled: the step, with the interval by which one worker's step is known, the speed-up, one step's tasks, and what a
# step would be without each thing that it waits for. The report's page *Planner* does the same in the browser.
#
# Opened in JupyterLab this notebook has controls, and everything follows them; as a page it shows the plan of its
# parameters. Gradients travel in a ring of equal links:
#
# $$t_c = 2(N-1)\alpha + 2\frac{N-1}{N} n \beta$$

# %% [markdown]
# ## Parameters
#
# `link` is the name of a file in data/machines/links, `workers` a power of two: what is shown first.

# %% tags=["parameters"]
out: str = ""
link: str = "10gbe"
workers: int = 16

# %%
from IPython.display import Markdown, display

from steptime.core.errors import InputError
from steptime.core.files import project_root, write_table
from steptime.core.machine import Link, read_link
from steptime.notebook import out_folder
from steptime.report import planning, style
from steptime.report.planner import read_recorded

root = project_root()
folder = out_folder(out, "planning")
style.use()
known = sorted(path.stem for path in (root / "data/machines/links").glob("*.yaml"))
links: dict[str, Link] = {name: read_link(root / "data/machines/links", name) for name in dict.fromkeys([link, *known])}
# what this machine measured is in the live planner and decides nothing of the page
recorded = sorted(read_recorded(root / "data/derived/fit"), key=lambda item: item.order)
if not recorded:
    raise InputError("data/derived/fit: has no layer profile; run `steptime measure`, then `steptime run fit`")

# %% [markdown]
# ## The plan

# %%
plan = planning.Plan(recorded[0], links[link], recorded[0].profile.batch, workers)
found = planning.computed(plan)
if out:
    display(Markdown(f"{planning.headline(plan, found)}\n\nThis is one plan; the notebook is live in JupyterLab."))
else:
    planner = planning.Planner(recorded, links, link, workers)
    display(planner.panel)

# %% [markdown]
# ## What the step waits for

# %%
for name, table in {"curve": found.curve, "without": found.without}.items():
    write_table(folder / f"derived/{name}.csv", table)
figures = {"timeline": planning.timeline_figure(plan, found), "speed_up": planning.curve_figure(plan, found)}
for name, figure in figures.items():
    style.save(figure, folder / f"figures/{name}.svg")
if out:
    display(planning.without(found))
    display(figures["timeline"])

# %% [markdown]
# ## More workers

# %%
if out:
    display(figures["speed_up"])
    display(found.curve.pivot(index="workers", columns="schedule", values="speed_up").round(2))
