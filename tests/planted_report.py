"""A small checkout with invented ("planted") inputs of the report, so that its pages can be built and looked at."""

import itertools
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from steptime.core.campaign import RUN_COLUMNS, SAMPLE_COLUMNS, Campaign, write_campaign
from steptime.core.files import write_json, write_text
from steptime.report import figures, style

STEP_S = {"mlp": 0.0021, "lenet": 0.0083, "alexnet": 0.0312, "googlenet": 0.0410, "resnet50": 0.0567}
FACTOR = {"torch": 1.0, "tensorflow": 1.22}
SHARES = {"io": 0.06, "forward": 0.3, "backward": 0.55, "update": 0.09}

PAPER = {
    "id": "planted2018",
    "citation": "A. Planted and B. Invented, “A DAG model of synchronous training”, 2018 (planted)",
    "link": "https://example.org/planted",
    "figures": [
        {
            "id": "speed-up-resnet",
            "text": "Speed-up of ResNet-50 on 16 workers",
            "value": 11.6,
            "unit": "times",
            "where": "Table 3",
            "conditions": "16 GPUs, 10 Gbit/s Ethernet, batch 32",
            "verified": True,
        },
        {
            "id": "merge-gain",
            "text": "Gain of merging",
            "value": 36.0,
            "unit": "%",
            "where": "from the abstract",
            "conditions": "8 workers",
            "verified": True,
        },
        {
            "id": "io-share",
            "text": "Share of input in the step of AlexNet",
            "value": None,
            "unit": "%",
            "where": "Figure 2",
            "conditions": "one GPU, no prefetch",
            "verified": False,
        },
    ],
}
CITED = {
    "message": "If you use it, cite it (planted).",
    "title": "planted study",
    "authors": [{"name": "The planters"}],
    "version": "0.1.0",
    "references": [
        {
            "type": "article",
            "title": "A planted paper",
            "authors": [{"given-names": "Ada", "family-names": "Planted"}],
            "year": 2018,
            "doi": "10.1/planted",
        }
    ],
}
_VERDICTS = (
    "holds",
    "holds in shape",
    "fitted",
    "inconclusive",
    "does not hold here",
    "unverified source",
    "needs a GPU",
)
_KINDS = ("measured", "modelled", "simulated", "emulated")


def plant(root: Path) -> Path:
    """Write every input of the report below `root`; returns `root`."""
    style.use()
    (root / "lib" / "steptime").mkdir(parents=True)
    write_text(root / "dvc.yaml", "stages: {}\n")
    write_text(root / "CITATION.cff", yaml.safe_dump(CITED, sort_keys=False))
    write_text(root / "CHANGELOG.md", "# Changes\n\n## 0.1.0\n\n* Something `new` (planted).\n")
    write_text(root / "data" / "published" / "planted2018.yaml", yaml.safe_dump(PAPER, sort_keys=False))
    write_text(root / "data" / "machines" / "planted.yaml", yaml.safe_dump(_machine(), sort_keys=False))
    link = _machine()["links"][0]
    write_text(root / "data" / "machines" / "links" / "planted.yaml", yaml.safe_dump(link, sort_keys=False))
    for folder in (root / "data" / "campaigns" / "planted-laptop", root / "data" / "raw" / "local"):
        write_campaign(campaign(folder.name), folder)
    write_text(root / "data" / "derived" / "predict" / "speed_up.csv", _speed_ups().to_csv(index=False))
    write_text(root / "data" / "derived" / "fit" / "step_times.csv", _times().to_csv(index=False))
    write_json(root / "data" / "derived" / "claims" / "planted.json", claims())
    style.save(figures.step_times(_times(), "Time of one training step (planted)"), _figure(root, "headline.svg"))
    style.save(figures.speed_up(_speed_ups(), title="Speed-up (planted)"), _figure(root, "speed_up.svg"))
    write_json(root / "data" / "derived" / "summary" / "summary.json", summary())
    for name, notebook in _notebooks().items():
        text = nbformat.writes(notebook, indent=1, sort_keys=True)
        write_text(root / "data" / "reports" / "notebooks" / f"{name}.ipynb", text + "\n")
    return root


def campaign(name: str) -> Campaign:
    """Ten cases in three rounds, one of them not run, with planted times and one disturbed step in twenty."""
    draw = np.random.default_rng(7)
    runs, samples = [], []
    for round_, (network, framework) in itertools.product(range(3), itertools.product(STEP_S, FACTOR)):
        run_id = f"r{round_}-{framework}-{network}"
        is_gpu = network == "resnet50" and framework == "tensorflow"
        runs.append(_run(run_id, network, framework, round_, "not_run" if is_gpu else "finished"))
        for repeat in range(0 if is_gpu else 24):
            time_s = STEP_S[network] * FACTOR[framework] * float(draw.lognormal(0, 0.03))
            flags = {"is_warmup": repeat < 4, "is_disturbed": repeat == 9}
            row = {"run_id": run_id, "phase": "step", "layer": None, "repeat": repeat, **flags, "time_s": time_s}
            samples.append(row | {"cpu_s": time_s, "run_delay_s": 1e-5, "load_1min": 0.4})
    run_table = pd.DataFrame(runs).reindex(columns=list(RUN_COLUMNS))
    return Campaign(name, run_table, pd.DataFrame(samples).reindex(columns=list(SAMPLE_COLUMNS)))


def claims() -> list[dict]:
    """One claim for each verdict."""
    figure_of = {"unverified source": PAPER["figures"][2]}
    rows = []
    for place, verdict in enumerate(_VERDICTS):
        figure = figure_of.get(verdict, PAPER["figures"][place % 2])
        ours = None if verdict == "needs a GPU" else 10.2 + 3 * place
        rows.append(
            {
                "id": f"planted-{place}",
                "paper": "planted2018",
                "figure": figure["id"],
                "claim": f"{figure['text']} (planted claim {place + 1})",
                "published": figure["value"],
                "unit": figure["unit"],
                "ours": ours,
                "ours_lo": ours and ours - 0.8,
                "ours_hi": ours and ours + 1.1,
                "kind": _KINDS[place % 4],
                "tolerance": "within 15 % of the published figure",
                "verdict": verdict,
                "why": "Our machine's memory is slower, so its backward pass hides more of the communication.",
                "how": "profile of this machine, link of the paper",
                "data": "data/derived/predict/speed_up.csv",
            }
        )
    return rows


def summary() -> dict:
    """The summary stage's hand-over."""
    table = [
        {"network": network, "torch_s": second, "tensorflow_s": second * FACTOR["tensorflow"], "batch": 32}
        for network, second in STEP_S.items()
    ]
    return {
        "question": "What does one training step cost, in which framework, on how many machines, and why?",
        "answers": [
            {
                "question": "device",
                "text": "On two cores torch takes less time than tensorflow for every network here (planted).",
                "figure": "headline.svg",
            },
            {
                "question": "device",
                "text": "Backward is more than half of every step (planted).",
                "figure": None,
            },
            {
                "question": "predicted",
                "text": "Over a 10 Gbit/s ring, merging keeps the speed-up on 64 workers near ideal (planted).",
                "figure": "speed_up.svg",
            },
        ],
        "headline": {
            "figure": "headline.svg",
            "caption": "Median step time with its 95 % interval, one thread, float32.",
            "columns": ["network", "batch", "torch_s", "tensorflow_s"],
            "table": table,
        },
        "campaigns": ["planted-laptop"],
    }


def _figure(root: Path, name: str) -> Path:
    return root / "data" / "figures" / "summary" / name


def _machine() -> dict:
    return {
        "name": "planted",
        "device": "cpu",
        "cores": 2,
        "memory_bytes": 8 * 2**30,
        "peak_flops_per_s": 6.1e10,
        "memory_bytes_per_s": 1.2e10,
        "links": [{"name": "10 GbE", "alpha_s": 5e-5, "beta_s_per_byte": 8e-10, "source": "planted"}],
        "source": "planted",
    }


def _run(run_id: str, network: str, framework: str, round_: int, status: str) -> dict:
    return {
        "run_id": run_id,
        "case_id": f"{framework}-{network}",
        "schema_version": 2,
        "framework": framework,
        "network": network,
        "size": "quick",
        "batch": 32,
        "dtype": "float32",
        "device": "cpu" if status == "finished" else "cuda",
        "threads": 1,
        "workers": 1,
        "input": "sequential",
        "round": round_,
        "position": 0,
        "seed": 1,
        "status": status,
        "reason": None if status == "finished" else "no GPU on this machine",
        "started_utc": f"2026-01-0{round_ + 1}T12:00:00Z",
        "duration_s": 2.0,
        "warmups": 4,
        "stop_reason": "interval narrow enough" if status == "finished" else None,
        "git_revision": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "code_hash": "c0de",
        "fingerprint": "f1",
        "command": "steptime run measure",
        "steptime_version": "0.1.0",
        "python_version": "3.11.9",
        "framework_version": {"torch": "2.13.0", "tensorflow": "2.21.0"}[framework],
        "blas": "mkl" if framework == "torch" else "eigen",
        "platform": "Linux 6.1 x86_64",
        "cpu_model": "Planted CPU @ 2.50GHz",
        "cores_present": 4,
        "cores_allowed": 2,
        "memory_bytes": 8 * 2**30,
        "is_virtual": True,
        "timer": "perf_counter",
        "timer_resolution_s": 1e-9,
    }


def _times() -> pd.DataFrame:
    rows = []
    for network, framework in itertools.product(STEP_S, FACTOR):
        time_s = STEP_S[network] * FACTOR[framework]
        row = {"network": network, "framework": framework, "median_s": time_s}
        rows.append(row | {"lo_s": time_s * 0.97, "hi_s": time_s * 1.04, "campaign": "planted-laptop"})
    return pd.DataFrame(rows)


def _phases() -> pd.DataFrame:
    rows = itertools.product(STEP_S, FACTOR, SHARES)
    return pd.DataFrame(
        {"network": n, "framework": f, "phase": p, "time_s": STEP_S[n] * FACTOR[f] * SHARES[p]} for n, f, p in rows
    )


def _speed_ups() -> pd.DataFrame:
    costs = {"end_of_backward": 0.08, "wait_free": 0.03, "merged": 0.01}
    rows = itertools.product(STEP_S, costs, (1, 2, 4, 8, 16, 32, 64))
    return pd.DataFrame(
        {
            "campaign": "planted-laptop",
            "network": network,
            "schedule": schedule,
            "workers": workers,
            "speed_up": round(workers / (1 + costs[schedule] * (workers - 1) ** 0.7), 4),
        }
        for network, schedule, workers in rows
    )


def _svg(figure: object) -> object:
    return new_output("display_data", {"image/svg+xml": style.svg_text(figure), "text/plain": "<Figure>"})


def _table(rows: pd.DataFrame) -> object:
    return new_output("execute_result", {"text/html": rows.to_html(), "text/plain": str(rows)})


def _notebooks() -> dict:
    parameters = new_code_cell('out: str = ""\nrounds: int = 3', metadata={"tags": ["parameters"]})
    injected = new_code_cell('out = "data/.runs/predict"\nrounds = 3', metadata={"tags": ["injected-parameters"]})
    imports = new_code_cell("from steptime.report import figures, style\n\nstyle.use()")
    print_line = new_code_cell("print(campaign)", outputs=[new_output("stream", text="planted campaign, 30 runs\n")])
    predict = [
        new_markdown_cell(
            "# What would more workers bring?\n\nFrom the layer profile of one device and the two constants of a link, "
            "$\\alpha$ and $\\beta$: step time and speed-up on $N$ workers, "
            "from [what was measured](20_measure.ipynb) (planted)."
        ),
        parameters,
        injected,
        imports,
        new_markdown_cell(
            "## The model\n\nA ring passes $n$ bytes between $N$ workers in\n\n"
            "$$t_c = 2 (N-1) \\alpha + 2 \\frac{N-1}{N} n \\beta$$\n\n"
            "and a step whose messages leave as soon as their gradients are there takes "
            "$t_{io} + t_{h2d} + t_f + t_b + t_c^{no} + t_u$; the terms are in the [glossary](glossary.html#symbols). "
            "The profile is that of [the measuring page](20_measure.ipynb).\n\n"
            "| term | meaning | share |\n|---|---|---|\n| `t_f` | forward | 30 % |\n| `t_b` | backward | 55 % |"
        ),
        new_markdown_cell("## Speed-up\n\nEach panel is one network; the thin line is ideal."),
        new_code_cell("figures.speed_up(table)", outputs=[_svg(figures.speed_up(_speed_ups()))]),
        new_markdown_cell("### The numbers behind it"),
        new_code_cell("table.head(8)", outputs=[_table(_speed_ups().head(8))]),
        new_markdown_cell("## What follows\n\nMerging pays ([data](../data/derived/predict/speed_up.csv))."),
    ]
    wide = _times().assign(**{f"quantity_{place}": 0.5 * place for place in range(9)})
    measure = [
        new_markdown_cell("# What does a step cost here?\n\nEvery network in both frameworks, one thread (planted)."),
        parameters,
        print_line,
        new_markdown_cell("## Whole steps"),
        new_code_cell("figures.step_times(table)", outputs=[_svg(figures.step_times(_times()))]),
        new_code_cell("wide", outputs=[_table(wide)]),
        new_markdown_cell("## Phases"),
        new_code_cell("figures.phases(table)", outputs=[_svg(figures.phases(_phases()))]),
        new_code_cell("1 + 1", outputs=[new_output("execute_result", {"text/plain": "2"})]),
    ]
    summary_cells = [new_markdown_cell("# What did we find?\n\nThe answers, and the claims (planted)."), parameters]
    cells = {"20_measure": measure, "40_predict": predict, "90_summary": summary_cells}
    for notebook in cells.values():
        for place, cell in enumerate(notebook):
            notebook[place] = type(cell)(cell, id=f"cell-{place:02d}")
    return {name: new_notebook(cells=notebook) for name, notebook in cells.items()}
