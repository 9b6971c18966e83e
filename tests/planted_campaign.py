"""A campaign of many settings with invented ("planted") times that follow stated rules, so that an analysis of it can
be checked against what was put in."""

import itertools

import numpy as np

from steptime import networks
from steptime.core.campaign import RUNS, SAMPLES, SCHEMA_VERSION, Campaign, as_table
from steptime.measure.plan import Case
from steptime.model.memory import described_bytes

FACTOR = {
    "torch": 1.0,
    "torch_channels_last": 0.8,
    "torch_compile": 0.7,
    "tensorflow": 1.3,
    "tensorflow_eager": 2.0,
    "tensorflow_xla": 0.702,
    "jax": 0.9,
    "caffe": 1.6,
}
"""Step time over torch's, before `PREFERS`; torch_compile and tensorflow_xla are closer than can be told."""
PREFERS = {("caffe", "lenet"): 0.3}
"""Caffe is the fastest on lenet."""
FUSED = ("torch_compile", "tensorflow_xla", "jax")
FIRST_STEP = {"torch_compile": 60.0, "tensorflow_xla": 40.0, "jax": 20.0, "tensorflow": 12.0}
"""First step over a usual one; 2 for the others."""
SAMPLE_S = {"lenet": 2e-4, "alexnet": 1.5e-3, "googlenet": 2e-3}
THREADS_FACTOR = {1: 1.0, 2: 0.6}
INPUT_FACTOR = {"sequential": 1.0, "prefetch": 0.95}
GPU_FACTOR = 0.1
BASE_BYTES, MEMORY_FACTOR = 250 * 2**20, 2.5
NO_DROPOUT = "layer drop6: dropout is not in this framework"
ROUNDS, STEPS, WARMUPS = 4, 12, 3


def campaign(name: str = "planted", devices: tuple[str, ...] = ("cpu",)) -> Campaign:
    """Three networks in eight settings: batches 8 and 16, one and two threads, two ways of reading; caffe cannot run
    alexnet."""
    draw = np.random.default_rng(11)
    runs, samples = [], []
    combinations = itertools.product(FACTOR, SAMPLE_S, (8, 16), devices, THREADS_FACTOR, INPUT_FACTOR)
    for framework, network, batch, device, threads, reading in combinations:
        case = Case(framework, network, "quick", batch, "float32", device, threads, reading)
        is_small = batch == 8 or threads == 2 or reading == "prefetch"
        if is_small and framework not in ("torch", "tensorflow", "torch_compile"):
            continue
        is_missing = (framework, network) == ("caffe", "alexnet")
        for number in range(ROUNDS):
            run = _run(case, number, "not_run" if is_missing else "finished")
            runs.append(run)
            if not is_missing:
                samples += _samples(case, run["run_id"], draw)
    return Campaign(name, as_table(runs, RUNS), as_table(samples, SAMPLES))


def step_s(case: Case) -> float:
    """The step that the rules above give."""
    device = GPU_FACTOR if case.device == "cuda" else 1.0
    own = FACTOR[case.framework] * PREFERS.get((case.framework, case.network), 1.0) * device
    # half of a step does not depend on the batch: twice the batch is 1.5 times the time
    work = SAMPLE_S[case.network] * (8 + case.batch)
    return work * own * THREADS_FACTOR[case.threads] * INPUT_FACTOR[case.input]


def peak_bytes(case: Case) -> int:
    described = described_bytes(networks.build(case.network), case.dtype).at(case.batch)
    return round(BASE_BYTES + MEMORY_FACTOR * described)


def _samples(case: Case, run_id: str, draw: np.random.Generator) -> list[dict]:
    mean = step_s(case) * float(draw.lognormal(0, 0.004))
    first = FIRST_STEP.get(case.framework, 2.0)
    rows = []
    for repeat in range(WARMUPS + STEPS):
        time_s = mean * (first if repeat == 0 else float(draw.lognormal(0, 0.01)))
        flags = {"repeat": repeat, "is_warmup": repeat < WARMUPS, "is_disturbed": False}
        own = {"run_id": run_id, "layer": None, **flags}
        rows.append(own | {"phase": "step", "time_s": time_s, "cpu_s": time_s * case.threads, "run_delay_s": 0.0})
        rows.append(own | {"phase": "io", "time_s": 0.05 * mean})
    if case.framework in FUSED:
        return rows
    own = {"run_id": run_id, "is_warmup": False, "is_disturbed": False}
    shares = {"h2d": 0.0, "forward": 0.3, "backward": 0.55, "update": 0.1}
    layers = networks.build(case.network).layers
    for phase, share in shares.items():
        rows += [own | {"phase": phase, "layer": None, "repeat": repeat, "time_s": share * mean} for repeat in (0, 1)]
    for phase, layer in itertools.product(("forward", "backward"), layers):
        time_s = shares[phase] * mean / len(layers)
        rows += [own | {"phase": phase, "layer": layer.name, "repeat": repeat, "time_s": time_s} for repeat in (0, 1)]
    return rows


def _run(case: Case, number: int, status: str) -> dict:
    is_done = status == "finished"
    names = ("framework", "network", "size", "batch", "dtype", "device", "threads", "input", "workers")
    return {
        "run_id": f"{case.case_id}-r{number:02d}",
        "case_id": case.case_id,
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(case, name) for name in names},
        "round": number,
        "position": 0,
        "seed": 1,
        "status": status,
        "reason": None if is_done else NO_DROPOUT,
        "started_utc": "2026-01-01T12:00:00Z",
        "duration_s": 2.0,
        "warmups": WARMUPS,
        "stop_reason": "rounds" if is_done else None,
        "parameters": 1000,
        "energy_j": 0.5 * STEPS if is_done else None,
        "peak_memory_bytes": peak_bytes(case) if is_done else None,
        "code_hash": "c0de",
        "fingerprint": "f1",
        "command": "steptime measure",
        "steptime_version": "0.1.0",
        "framework_version": "1.0",
        "platform": "Linux",
        "cpu_model": "Planted CPU",
        "cores_present": 2,
        "cores_allowed": 2,
        "memory_bytes": 8 * 2**30,
        "is_virtual": True,
        "timer": "perf_counter",
    }


MACHINE = {
    "name": "planted",
    "device": "Planted CPU",
    "cores": 1,
    "memory_bytes": 8 * 2**30,
    "peak_flops_per_s": 6e10,
    "memory_bytes_per_s": 1.2e10,
    "source": "planted",
}
"""The planted machine's peaks, of one thread."""
