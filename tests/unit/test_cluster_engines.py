"""The frameworks' own engines, really run: averages of one process, bytes within bounds, nothing left after a kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from steptime import frameworks, networks
from steptime.cluster import engines
from steptime.cluster import links as shaped
from steptime.cluster.campaigns import WorkersPlan, cells_of, measure_workers
from steptime.cluster.engines import ENGINES, SESSIONS, by_engine, named, synchronisation, train
from steptime.cluster.launcher import Place
from steptime.cluster.links import Links
from steptime.cluster.schedules import Learnable, learnable_of, ring_bytes
from steptime.cluster.torch_gloo import LEARNING_RATE, WORKER, Job
from steptime.core.errors import InputError
from steptime.core.step import LayerProfile
from steptime.core.workers import read_workers
from steptime.measure import lock

BATCH, STEPS, SEED = 4, 3, 1
NETWORK = networks.build("lenet", width=0.4, image=28)
LAYERS = learnable_of(NETWORK)
TOLERANCE = 1e-5
AVERAGED = [
    ("tensorflow_multiworker", "pack", 2),
    ("tensorflow_multiworker", "pack=20000", 2),
    ("tensorflow_multiworker", "pack", 3),
    ("tensorflow_multiworker", "pack=20000", 4),
    ("mxnet_kvstore", "dist_sync=1", 2),
    ("mxnet_kvstore", "dist_sync=2", 3),
    ("mxnet_kvstore", "dist_sync=2", 4),
    ("mxnet_kvstore", "dist_device_sync", 2),
    ("cntk_mpi", "bits=32", 2),
    ("cntk_mpi", "bits=32", 3),
    ("cntk_mpi", "bits=32", 4),
    ("chainermn_mpi", "naive", 2),
    ("chainermn_mpi", "naive", 3),
    ("chainermn_mpi", "naive", 4),
    ("caffe_mpi", "end_of_backward", 2),
    ("caffe_mpi", "end_of_backward", 4),
    ("caffe_mpi", "wait_free", 3),
    ("caffe_mpi", "wait_free", 4),
]


def skip_unless_installed(name: str) -> None:
    try:
        engines.check_installed(name)
    except InputError as error:
        pytest.skip(str(error))


def reference(name: str, workers: int, out: Path, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> None:
    """The same training in one process of the same framework, by tests/engine_reference.py."""
    setting = frameworks.SETTINGS[ENGINES[name].setting]
    job = {
        **{"network": asdict(NETWORK), "batch": BATCH, "seed": SEED, "learning_rate": learning_rate, "steps": steps},
        **{"adapter": str(setting.adapter), "worker": str(WORKER), "mode": setting.mode, "workers": [workers]},
        "out": str(out),
    }
    program = Path(__file__).parents[1] / "engine_reference.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **setting.child_environment}
    subprocess.run(
        [str(setting.interpreter), str(program)], input=json.dumps(job), text=True, check=True, env=environment
    )


def largest_error(found: Path, wanted: Path) -> float:
    """Over tensors, |a - b| / |b|; the names must be the same."""
    a, b = np.load(found), np.load(wanted)
    assert set(a) == set(b)
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


@pytest.mark.parametrize(("name", "schedule", "workers"), AVERAGED)
def test_the_averages_are_those_of_one_process(name: str, schedule: str, workers: int, tmp_path: Path) -> None:
    skip_unless_installed(name)
    reference(name, workers, tmp_path)
    sync = synchronisation(name, schedule, LAYERS, workers, BATCH)
    places = [Place()] * len(sync.nodes)
    job = Job(NETWORK, None, BATCH, warmups=1, steps=STEPS - 1, seed=SEED, save=tmp_path)
    answers = train(name, job, sync, LAYERS, places, timeout_s=120)
    for step in range(STEPS):
        for rank in range(workers):
            found = tmp_path / f"gradients-{step}-rank{rank}.npz"
            assert largest_error(found, tmp_path / f"{workers}-{step}.npz") <= TOLERANCE, (step, rank)
    assert len(answers.workers) == workers
    for answer in answers.workers:
        assert answer["parameters"] == NETWORK.parameter_count
        assert frameworks.installed_version(ENGINES[name].setting).startswith(answer["versions"]["framework"])
        assert len(answer["steps"]) == len(answer["losses"]) == STEPS
        for step in answer["steps"]:
            stamps = [step[f"{part}_s"] for part in ("start", "forward", "backward", "averaged", "updated", "end")]
            shown = [stamp for stamp in stamps if stamp is not None]
            assert shown == sorted(shown)
            assert stamps[0] < stamps[-1]


def test_one_bit_gives_two_values_a_column_and_forgets_nothing(tmp_path: Path) -> None:
    """Seide et al. 2014: what a step's two values leave out is added to the next step's gradient. So the sum of what
    was given stays as near to the sum of the true gradients as after one step, however many steps there are."""
    skip_unless_installed("cntk_mpi")
    steps = 24
    reference("cntk_mpi", 2, tmp_path, steps, learning_rate=0.0)
    sync = synchronisation("cntk_mpi", "bits=1", LAYERS, 2, BATCH)
    job = Job(NETWORK, None, BATCH, warmups=0, steps=steps, seed=SEED, save=tmp_path)
    train("cntk_mpi", job, sync, LAYERS, [Place()] * 2, timeout_s=120, learning_rate=0.0)
    found = [np.load(tmp_path / f"gradients-{step}-rank0.npz") for step in range(steps)]
    wanted = [np.load(tmp_path / f"2-{step}.npz") for step in range(steps)]
    largest = max(wanted[0], key=lambda name: wanted[0][name].size)
    for each in found:
        # The layer's weights are (out, in) here; a column there is what one input weighs in all outputs.
        assert max(len(np.unique(column)) for column in each[largest].T) <= 2
    behind = np.cumsum([w[largest] - f[largest] for w, f in zip(wanted, found, strict=True)], axis=0)
    distances = [float(np.linalg.norm(each)) for each in behind]
    single = [float(np.linalg.norm(w[largest] - f[largest])) for w, f in zip(wanted, found, strict=True)]
    assert min(single) > 0.1 * float(np.linalg.norm(wanted[0][largest])), "two values are far from the gradient"
    assert max(distances[steps // 2 :]) <= 2 * max(distances[: steps // 2])
    assert distances[-1] < 0.3 * sum(single)


# ------------------------------------------------------------------------------------------------------- in a campaign


def test_engines_stand_side_by_side_in_a_campaign() -> None:
    schedules = ("wait_free", "mxnet_kvstore/dist_sync=2", "mxnet_kvstore/dist_sync=1", "cntk_mpi/bits=1")
    plan = WorkersPlan(network="lenet", batch=BATCH, workers=(1, 2), schedules=schedules, rates=(None, 1e9))
    cells = cells_of(plan, LAYERS)
    assert sorted((cell.engine, cell.sync.label) for cell in cells if cell.sync.workers == 1) == [
        ("cntk_mpi", "bits"),
        ("mxnet_kvstore", "dist_sync"),
        ("torch_gloo", "end_of_backward"),
    ]
    assert len({cell.case_id for cell in cells}) == len(cells) == 3 + 2 * len(schedules)
    with pytest.raises(InputError, match=r"engine = 'horovod': unknown; known are torch_gloo, tensorflow_multiworker"):
        cells_of(plan.model_copy(update={"schedules": ("horovod/ring",)}), LAYERS)


def test_an_option_names_the_engine_of_schedules_that_name_none() -> None:
    assert by_engine("cntk_mpi", ()) == ("cntk_mpi/bits",)
    assert by_engine("cntk_mpi", ("bits=1", "caffe_mpi/wait_free")) == ("cntk_mpi/bits=1", "caffe_mpi/wait_free")
    assert by_engine(None, ("wait_free",)) == by_engine("torch_gloo", ("wait_free",)) == ("wait_free",)
    assert named("merged=a/b.json") == ("torch_gloo", "merged=a/b.json")


def test_a_measured_campaign_says_whose_engine_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that shows its phases and one that runs a step whole."""
    for name in ("mxnet_kvstore", "tensorflow_multiworker"):
        skip_unless_installed(name)
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    schedules = ("mxnet_kvstore/dist_sync=1", "tensorflow_multiworker/pack=0")
    plan = WorkersPlan(network="lenet", batch=BATCH, workers=(2,), schedules=schedules, rounds=1, warmups=1, steps=3)
    measure_workers(plan, tmp_path / "out", report=lambda line: None)
    found = read_workers(tmp_path / "out")
    runs = found.campaign.runs.merge(found.workers, on="run_id").set_index("engine")
    assert dict(runs["framework"]) == {"mxnet_kvstore": "mxnet", "tensorflow_multiworker": "tensorflow"}
    assert runs["fingerprint"].nunique() == 2
    assert runs.loc["mxnet_kvstore", "backward_s"] > 0
    assert np.isnan(runs.loc["tensorflow_multiworker", "backward_s"])
    assert set(runs["compute"]) == {"real compute, real communication"}


# --------------------------------------------------------------------------------------------------- bytes on the wire

SIZES = (40_000, 400_000, 1_600_000, 8_000)
PLANTED = [Learnable(f"fc{number}", size) for number, size in enumerate(SIZES)]


def profile(seconds: float = 0.0) -> LayerProfile:
    times, zeros = np.full(len(SIZES), seconds), np.zeros(len(SIZES))
    names = tuple(layer.name for layer in PLANTED)
    return LayerProfile("planted", "planted", BATCH, names, times, times, np.array(SIZES, float), zeros)


@pytest.fixture(scope="module")
def linked() -> Iterator[Links]:
    try:
        shaped.check_able()
    except InputError as error:
        pytest.skip(str(error))
    with shaped.links(4, None) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "schedule", "workers"),
    [
        ("tensorflow_multiworker", "pack", 2),
        ("tensorflow_multiworker", "pack=500000", 3),
        ("mxnet_kvstore", "dist_sync=1", 3),
        ("mxnet_kvstore", "dist_sync=2", 2),
        ("cntk_mpi", "bits=32", 3),
        ("chainermn_mpi", "naive", 2),
        ("caffe_mpi", "end_of_backward", 3),
        ("caffe_mpi", "wait_free", 2),
    ],
)
def test_between_hosts_a_worker_sends_its_gradients_and_little_more(
    linked: Links, name: str, schedule: str, workers: int
) -> None:
    """Two namespaces are two hosts to all engines: mpirun starts its daemons there."""
    skip_unless_installed(name)
    sync = synchronisation(name, schedule, PLANTED, workers, BATCH)
    job = Job(None, profile(), BATCH, warmups=2, steps=6)
    answers = train(name, job, sync, PLANTED, linked.places, timeout_s=120)
    assert answers.sent_bytes is not None
    most = sum(SIZES) * rabenseifner(workers) if ENGINES[name].uses_mpi else max(sync.sent_bytes[:workers])
    assert sync.sent_bytes[0] <= max(answers.sent_bytes) <= most_bytes(most)
    assert min(answers.sent_bytes) >= min(sync.sent_bytes[0], sum(SIZES))


def rabenseifner(workers: int) -> float:
    """What a rank of OpenMPI's all-reduce of large messages sends at most, over their bytes.

    Rabenseifner 2004: 2 (p - 1) / p among p, a power of two, as a ring does; where more are there, first half of the
    vector to a partner and at the end all of it.
    """
    p = 1 << (workers.bit_length() - 1)
    return 2 * (p - 1) / p + (1.5 if workers > p else 0.0)


def most_bytes(wanted: float) -> float:
    """8 % for headers and acknowledgements of what comes in, and some small messages of the engine's own."""
    return 1.08 * wanted + 40_000


def test_one_bit_sends_far_less(linked: Links) -> None:
    skip_unless_installed("cntk_mpi")
    network = networks.build("mlp")
    layers = learnable_of(network)
    sent = {}
    for schedule in ("bits=32", "bits=1"):
        sync = synchronisation("cntk_mpi", schedule, layers, 2, BATCH)
        answers = train("cntk_mpi", Job(network, None, BATCH, 1, 4), sync, layers, linked.places, timeout_s=120)
        assert answers.sent_bytes is not None
        sent[schedule] = max(answers.sent_bytes)
        assert sent[schedule] >= sync.sent_bytes[0]
    assert sent["bits=32"] <= most_bytes(ring_bytes(sum(each.n_bytes for each in layers), 2))
    assert sent["bits=1"] < sent["bits=32"] / 8


# ----------------------------------------------------------------------------------------------------- replayed passes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", list(ENGINES))
def test_a_replayed_step_takes_no_less_than_its_profile(name: str, workers: int) -> None:
    skip_unless_installed(name)
    each_s = 0.01
    sync = synchronisation(name, ENGINES[name].schedules[0], PLANTED, workers, BATCH)
    job = Job(None, profile(each_s), BATCH, warmups=1, steps=3)
    answers = train(name, job, sync, PLANTED, [Place()] * len(sync.nodes), timeout_s=60)
    for answer in answers.workers:
        assert answer["parameters"] == sum(SIZES) // 4
        for step in answer["steps"]:
            assert step["end_s"] - step["start_s"] >= 2 * len(SIZES) * each_s - 1e-6
            assert step["backward_s"] - step["forward_s"] >= len(SIZES) * each_s - 1e-6


# ----------------------------------------------------------------------------------------------------------- failures

PARENT = """
import sys
from steptime import networks
from steptime.cluster.engines import *
from steptime.cluster.launcher import Place, RunFailed
from steptime.cluster.schedules import learnable_of
network = networks.build("lenet", width=0.4, image=28)
layers = learnable_of(network)
name = sys.argv[1]
sync = synchronisation(name, ENGINES[name].schedules[0], layers, 2, 4)
try:
    train(name, Job(network, None, 4, 1, 10**6), sync, layers, [Place()] * len(sync.nodes), timeout_s=100)
except RunFailed as error:
    print(error)
"""


def marked(mark: str) -> list[int]:
    """The processes alive that have the mark in their environment, which whatever they start inherits."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def left(mark: str, within_s: float = 5.0) -> list[int]:
    end = time.monotonic() + within_s
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.02)
    return marked(mark)


def started(name: str, least: int) -> tuple[subprocess.Popen[str], str]:
    """A run of two workers without end, by a process of its own, once `least` processes are there."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "STEPTIME_MARK": mark}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name], env=environment, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while len(marked(mark)) < least:
        assert parent.poll() is None, "the run has ended by itself"
        assert time.monotonic() < end, "the run does not begin"
        time.sleep(0.01)
    return parent, mark


@pytest.mark.parametrize("name", list(ENGINES))
def test_five_kills_leave_nothing(name: str) -> None:
    skip_unless_installed(name)
    generator = random.Random(name)
    processes = 1 + (4 if name == "mxnet_kvstore" else 3 if ENGINES[name].uses_mpi else 2)
    for number in range(5):
        parent, mark = started(name, processes if number else 2)
        time.sleep(generator.uniform(0, 3))
        kills_parent = number % 2 == 0
        victims = [pid for pid in marked(mark) if pid != parent.pid]
        begun = time.monotonic()
        os.kill(parent.pid if kills_parent else generator.choice(victims), signal.SIGKILL)
        said, _ = parent.communicate(timeout=20)
        assert time.monotonic() - begun < 10
        if not kills_parent:
            assert "was ended by" in said
            assert len(said.splitlines()) == 1
        assert left(mark) == []
    # What an MPI run keeps in the temporary folder is removed by the next.
    with engines._session():
        kept = [path.name.removeprefix(SESSIONS) for path in Path(tempfile.gettempdir()).glob(f"{SESSIONS}*")]
    assert all(Path(f"/proc/{name.partition('-')[0]}").exists() for name in kept)


def test_what_is_not_installed_is_one_line_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = synchronisation("mxnet_kvstore", "dist_sync", LAYERS, 2, BATCH)
    monkeypatch.setattr(frameworks, "installed_version", lambda name: None)
    with pytest.raises(InputError, match=r"^engine = 'mxnet_kvstore': mxnet .*: steptime env create mxnet$"):
        train("mxnet_kvstore", Job(NETWORK, None, BATCH, 1, 1), sync, LAYERS, [Place()] * 3)
    monkeypatch.setattr(frameworks, "installed_version", lambda name: "1")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"mpirun is not installed: apt-get install -y openmpi-bin$"):
        engines.check_installed("caffe_mpi")


@pytest.mark.parametrize(
    ("name", "schedule", "said"),
    [
        ("horovod", "ring", r"engine = 'horovod': unknown; known are torch_gloo, tensorflow_multiworker"),
        ("chainermn_mpi", "flat", r"cannot run it here: it packs gradients in the memory of a GPU by CuPy"),
        ("mxnet_kvstore", "wait_free", r"unknown to mxnet_kvstore; known are dist_sync, dist_device_sync"),
        ("mxnet_kvstore", "dist_sync=0", r"must be a whole number from 1 to 16"),
        ("cntk_mpi", "bits=8", r"bits must be 1 or 32"),
        ("caffe_mpi", "wait_free=2", r"takes no value"),
    ],
)
def test_a_schedule_that_an_engine_lacks_is_one_line(name: str, schedule: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        synchronisation(name, schedule, LAYERS, 2, BATCH)


def test_the_least_bytes_are_those_of_the_engines_exchange() -> None:
    total = sum(SIZES)
    assert (
        synchronisation("mxnet_kvstore", "dist_sync=2", PLANTED, 3, BATCH).sent_bytes
        == (total,) * 3 + (1.5 * total,) * 2
    )
    assert synchronisation("mxnet_kvstore", "dist_sync=2", PLANTED, 1, BATCH).sent_bytes == (0.0,)
    assert synchronisation("cntk_mpi", "bits=1", PLANTED, 4, BATCH).sent_bytes == pytest.approx([1.5 * total / 32] * 4)
    assert synchronisation("caffe_mpi", "wait_free", PLANTED, 2, BATCH).ends == (1, 2, 3, 4)
    assert synchronisation("caffe_mpi", "end_of_backward", PLANTED, 2, BATCH).ends == (4,)
