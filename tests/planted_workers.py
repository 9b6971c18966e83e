"""A campaign of many workers with invented ("planted") times: each step is what `HOST` and its links make of it by the
model, times noise, so that what a study finds can be checked against what was put in."""

from pathlib import Path
from typing import Any

import numpy as np

from steptime import networks
from steptime.core.campaign import RUNS, SAMPLES, SCHEMA_VERSION, Campaign, as_table, write_campaign
from steptime.core.files import json_text
from steptime.core.step import LayerProfile
from steptime.core.workers import EMULATED, TIMELINES, WORKERS, csv_text, profile_table
from steptime.model.merging import Ends
from steptime.model.worker_steps import Cell, Host, Replayed, ShapedLink, WorkerStep, predict

NETWORK, BATCH, CORES = "alexnet", 16, 2
HOST = Host(CORES, 3e-4, 4e-5, 5e-10, 3e-10, 0.1)
ROUND_CPU_S = 1e-4
"""What a rank uses in a round: more than two messages cost, for it wakes others."""
RATES = (250e6, 500e6)
ROUNDS, STEPS, WARMUPS, NOISE = 3, 6, 1, 0.004
UNSHAPED_BETA = 5e-10
ENDS: dict[str, Ends] = {
    "end_of_backward": (8,),
    "wait_free": tuple(range(1, 9)),
    "merged=3-abc123": (1, 3, 8),
    "ps_central": tuple(range(1, 9)),
    "ps_sharded": tuple(range(1, 9)),
}


def profile() -> LayerProfile:
    """AlexNet's own sizes, a passage of 60 ms back and half of it forth, shared out evenly."""
    layers = networks.build(NETWORK, size="quick").layers
    count = len(layers)
    return LayerProfile(
        NETWORK,
        "planted: case",
        BATCH,
        tuple(layer.name for layer in layers),
        np.full(count, 0.03 / count),
        np.full(count, 0.06 / count),
        np.array([4.0 * layer.parameter_count for layer in layers]),
        np.zeros(count),
    )


def link(rate: float) -> ShapedLink:
    return ShapedLink(1.2e-5, 1.04 * 8 / rate, float(1 << 17))


def step(schedule: str, workers: int, rate: float | None) -> WorkerStep:
    """The step that was put in, before noise; a lone worker needs 1 ms beyond its profile."""
    of = None if rate is None else link(rate)
    cell = Cell(schedule.partition("=")[0], workers, ENDS[schedule], of)
    return predict(Replayed(profile(), 0.001), cell, HOST)


def write(folder: Path, name: str = "planted-workers", compute: str = EMULATED) -> Path:
    """The campaign in `folder`/`name`; the folder."""
    draw = np.random.default_rng(5)
    cells: list[tuple[str, int, float | None]] = [("end_of_backward", 1, None)]
    cells += [(schedule, workers, rate) for schedule in ENDS for workers in (2, 4, 8) for rate in RATES]
    runs, samples, workers_rows, timelines = [], [], [], []
    for schedule, workers, rate in cells:
        found = step(schedule, workers, rate)
        own = COUNTERS | {"cpu_s": cpu_s(schedule, workers)}
        case_id = f"torch_gloo-{NETWORK}-quick-b{BATCH}-w{workers}-{schedule}-{_rate_name(rate)}-emulated"
        for number in range(ROUNDS):
            run_id = f"{case_id}-r{number:02d}"
            runs.append(_run(run_id, case_id, workers, number))
            drawn = draw.lognormal(0, NOISE)
            for repeat in range(WARMUPS + STEPS):
                flags = {"repeat": repeat, "is_warmup": repeat < WARMUPS, "is_disturbed": False}
                time_s = found.step_s * drawn * draw.lognormal(0, NOISE)
                samples.append({"run_id": run_id, "phase": "step", "layer": None, **flags, "time_s": time_s} | own)
            workers_rows.append(_workers_row(run_id, schedule, workers, rate, found, compute))
        for task in found.timeline.tasks:
            of = {"run_id": f"{case_id}-r00", "worker": 0, "resource": task.resource, "layer": task.layer or None}
            of["task"] = "exchange" if task.kind == "communicate" else task.kind
            timelines.append(of | {"start_s": task.start_s, "end_s": task.end_s})
    beside = {
        "workers.csv": csv_text(as_table(workers_rows, WORKERS)),
        "timelines.csv": csv_text(as_table(timelines, TIMELINES)),
        "profile.csv": csv_text(profile_table(profile())),
        "plan.json": json_text({"network": NETWORK}),
    }
    write_campaign(Campaign(name, as_table(runs, RUNS), as_table(samples, SAMPLES)), folder / name, beside)
    return folder / name


COUNTERS = {"run_delay_s": 0.0, "involuntary_switches": 0, "steal_s": 0.0, "load_1min": 0.5}


def cpu_s(schedule: str, workers: int) -> float:
    """Processor time of all workers: 5 ms each, and what rounds and messages to and from servers cost."""
    if workers == 1:
        return 0.005
    servers = {"ps_central": 1, "ps_sharded": workers}.get(schedule)
    messages = len(ENDS[schedule])
    rounds_s = 2 * (workers - 1) * messages * ROUND_CPU_S
    return workers * (0.005 + (rounds_s if servers is None else 2 * servers * messages * HOST.message_cpu_s))


def _rate_name(rate: float | None) -> str:
    return "loopback" if rate is None else f"{rate / 1e6:.0f}mbit"


def _run(run_id: str, case_id: str, workers: int, number: int) -> dict[str, Any]:
    return {
        **{"run_id": run_id, "case_id": case_id, "schema_version": SCHEMA_VERSION, "framework": "torch"},
        **{"network": NETWORK, "size": "quick", "batch": BATCH, "dtype": "float32", "device": "cpu", "threads": 1},
        **{"workers": workers, "input": "sequential", "round": number, "position": 0, "seed": 1},
        **{"status": "finished", "reason": None, "duration_s": 60.0, "warmups": WARMUPS, "parameters": 1_279_082},
        **{"git_revision": "0" * 40, "git_dirty": False, "code_hash": "planted", "fingerprint": "planted"},
        **{"command": "steptime workers run", "steptime_version": "0", "python_version": "3", "timer": "monotonic"},
        **{"framework_version": "2", "platform": "planted", "cpu_model": "planted", "cores_present": CORES},
        **{"cores_allowed": CORES, "memory_bytes": 2**34, "is_virtual": True, "load_1min": 0.5},
    }


def _workers_row(
    run_id: str, schedule: str, workers: int, rate: float | None, found: WorkerStep, compute: str
) -> dict[str, Any]:
    servers = {"ps_central": 1, "ps_sharded": workers}.get(schedule, 0)
    of = None if rate is None else link(rate)
    return {
        **{"run_id": run_id, "engine": "torch_gloo", "schedule": schedule, "compute": compute},
        **{"profile": "planted: case", "ranks": workers + servers, "nodes": workers},
        "ends": None if rate is None else " ".join(map(str, ENDS[schedule])),
        "rate_bits_per_s": rate,
        "alpha_s": None if of is None else of.alpha_s,
        "beta_s_per_byte": None if of is None else of.beta_s_per_byte,
        "unshaped_beta_s_per_byte": None if of is None else UNSHAPED_BETA,
        "is_cpu_bound": rate is not None and workers * rate / 8 > 1 / 3 / UNSHAPED_BETA,
        "sent_bytes": None if rate is None else 2.02 * (workers - 1) / workers * float(profile().parameter_bytes.sum()),
        "expected_bytes": 2 * (workers - 1) / workers * float(profile().parameter_bytes.sum()),
        **{"forward_s": profile().t_f_s, "backward_s": profile().t_b_s, "exposed_s": found.exposed_s},
        "update_s": 0.0,
    }
