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


ENGINES = {
    "caffe_mpi/end_of_backward": "end_of_backward",
    "caffe_mpi/wait_free": "wait_free",
    "cntk_mpi/bits=32": "end_of_backward",
    "mxnet_kvstore/dist_sync=1": "ps_central",
    "tensorflow_multiworker/pack=0": "end_of_backward",
}
"""Schedules of the frameworks' own engines -> what they are here."""
FAST = 16


def profile(times_as_fast: float = 1.0) -> LayerProfile:
    """AlexNet's own sizes, a passage of 60 ms back and half of it forth, shared out evenly."""
    layers = networks.build(NETWORK, size="quick").layers
    count = len(layers)
    return LayerProfile(
        NETWORK,
        "planted: case",
        BATCH,
        tuple(layer.name for layer in layers),
        np.full(count, 0.03 / count / times_as_fast),
        np.full(count, 0.06 / count / times_as_fast),
        np.array([4.0 * layer.parameter_count for layer in layers]),
        np.zeros(count),
    )


def link(rate: float) -> ShapedLink:
    return ShapedLink(1.2e-5, 1.04 * 8 / rate, float(1 << 17))


def step(schedule: str, workers: int, rate: float | None, times_as_fast: float = 1.0) -> WorkerStep:
    """The step that was put in, before noise; a lone worker needs 1 ms beyond its profile."""
    of = None if rate is None else link(rate)
    cell = Cell(schedule.partition("=")[0], workers, ENDS[schedule], of)
    return predict(Replayed(profile(times_as_fast), 0.001), cell, HOST)


_Cells = list[tuple[str, str, str, int, float | None]]
"""Engine, its schedule, which of ENDS that is, workers, rate."""


def write(folder: Path, name: str = "planted-workers", compute: str = EMULATED) -> Path:
    """A campaign of torch.distributed in `folder`/`name`; the folder."""
    cells: _Cells = [("torch_gloo", "end_of_backward", "end_of_backward", 1, None)]
    cells += [("torch_gloo", each, each, workers, rate) for each in ENDS for workers in (2, 4, 8) for rate in RATES]
    return _write(folder / name, cells, compute)


def write_engines(folder: Path, name: str = "planted-engines", times_as_fast: float = 1.0) -> Path:
    """A campaign of the frameworks' own engines, each as ENGINES has it, on 4 workers; the folder."""
    cells: _Cells = []
    for key, of in ENGINES.items():
        engine, _, schedule = key.partition("/")
        if engine not in {cell[0] for cell in cells}:
            cells.append((engine, schedule, "end_of_backward", 1, None))
        cells.append((engine, schedule, of, 4, RATES[1]))
    return _write(folder / name, cells, EMULATED, times_as_fast)


def _write(path: Path, cells: _Cells, compute: str, times_as_fast: float = 1.0) -> Path:
    draw = np.random.default_rng(5)
    runs, samples, workers_rows, timelines = [], [], [], []
    for engine, schedule, of, workers, rate in cells:
        found = step(of, workers, rate, times_as_fast)
        own = COUNTERS | {"cpu_s": cpu_s(of, workers)}
        case_id = f"{engine}-{NETWORK}-quick-b{BATCH}-w{workers}-{schedule}-{_rate_name(rate)}-emulated"
        for number in range(ROUNDS):
            run_id = f"{case_id}-r{number:02d}"
            runs.append(_run(run_id, case_id, workers, number))
            drawn = draw.lognormal(0, NOISE)
            for repeat in range(WARMUPS + STEPS):
                flags = {"repeat": repeat, "is_warmup": repeat < WARMUPS, "is_disturbed": False}
                time_s = found.step_s * drawn * draw.lognormal(0, NOISE)
                samples.append({"run_id": run_id, "phase": "step", "layer": None, **flags, "time_s": time_s} | own)
            row = _workers_row(run_id, of, workers, rate, found, compute)
            workers_rows.append(row | {"engine": engine, "schedule": schedule})
        for task in found.timeline.tasks:
            told = {"run_id": f"{case_id}-r00", "worker": 0, "resource": task.resource, "layer": task.layer or None}
            told["task"] = "exchange" if task.kind == "communicate" else task.kind
            timelines.append(told | {"start_s": task.start_s, "end_s": task.end_s})
    beside = {
        "workers.csv": csv_text(as_table(workers_rows, WORKERS)),
        "timelines.csv": csv_text(as_table(timelines, TIMELINES)),
        "profile.csv": csv_text(profile_table(profile(times_as_fast))),
        "plan.json": json_text({"network": NETWORK}),
    }
    write_campaign(Campaign(path.name, as_table(runs, RUNS), as_table(samples, SAMPLES)), path, beside)
    return path


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
    sent = float(profile().parameter_bytes.sum()) * (1.0 if servers == 1 else 2 * (workers - 1) / workers)
    return {
        **{"run_id": run_id, "compute": compute},
        **{"profile": "planted: case", "ranks": workers + servers, "nodes": workers},
        "ends": None if rate is None else " ".join(map(str, ENDS[schedule])),
        "rate_bits_per_s": rate,
        "alpha_s": None if of is None else of.alpha_s,
        "beta_s_per_byte": None if of is None else of.beta_s_per_byte,
        "unshaped_beta_s_per_byte": None if of is None else UNSHAPED_BETA,
        "is_cpu_bound": rate is not None and workers * rate / 8 > 1 / 3 / UNSHAPED_BETA,
        "sent_bytes": None if rate is None else 1.01 * sent,
        "expected_bytes": sent,
        **{"forward_s": profile().t_f_s, "backward_s": profile().t_b_s, "exposed_s": found.exposed_s},
        "update_s": 0.0,
    }
