"""torch.distributed, really run: the averages are those of one process; no more is sent than the closed forms say."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from processes import gone

from steptime import networks
from steptime.cluster import links as shaped
from steptime.cluster.launcher import Place, RunFailed, listening
from steptime.cluster.links import Links
from steptime.cluster.schedules import CHUNK_VALUES, Learnable, learnable_of, synchronisation
from steptime.cluster.torch_gloo import ADAPTER, LEARNING_RATE, WORKER, Job, train
from steptime.core.errors import InputError
from steptime.core.network import Network
from steptime.core.step import LayerProfile

BATCH, STEPS, SEED = 4, 3, 1
WORKERS = (2, 3, 4)
NETWORK = networks.build("lenet", width=0.4, image=28)
LAYERS = learnable_of(NETWORK)
ON_ONE_TEAM = (
    "end_of_backward",
    "layers_after_backward",
    "wait_free",
    "buckets=20000",
    "lazy=20000",
    "merged",
    "sufficient_factors",
    "sparse=0.5",
    "local_sgd=2",
)
"""Run one after the other by the same ranks, to save starting them."""
ON_OTHERS = ("ps_central", "ps_sharded", "hierarchical")
DENSE = (*ON_ONE_TEAM[:7], *ON_OTHERS)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one process, by tests/cluster_reference.py."""
    out = tmp_path_factory.mktemp("reference")
    cases = []
    for workers in WORKERS:
        cases += [
            {"name": f"dense-{workers}", "workers": workers, "rule": "dense"},
            {
                **{"name": f"sparse-{workers}", "workers": workers, "rule": "sparse"},
                **{"sparsity": 0.5, "chunk_values": CHUNK_VALUES},
            },
            {"name": f"local-{workers}", "workers": workers, "rule": "local", "period": 2},
        ]
    job = {
        **{"network": asdict(NETWORK), "batch": BATCH, "seed": SEED, "learning_rate": LEARNING_RATE, "steps": STEPS},
        **{"adapter": str(ADAPTER), "worker": str(WORKER), "out": str(out), "cases": cases},
    }
    program = Path(__file__).parents[1] / "cluster_reference.py"
    subprocess.run([sys.executable, str(program)], input=json.dumps(job), text=True, check=True)
    return out


def run(schedules: Sequence[str], workers: int, out: Path, network: Network = NETWORK) -> None:
    """Train by each schedule, gradients and weights saved in a folder of its name."""
    layers, jobs = learnable_of(network), []
    for name in schedules:
        (out / name).mkdir()
        schedule = f"hierarchical={3 if workers == 3 else 2}" if name == "hierarchical" else name
        if name == "merged":
            names = [layer.name for layer in reversed(layers)]
            (out / "plan.json").write_text(json.dumps({"groups": [names[:1], names[1:3], names[3:]]}))
            schedule = f"merged={out / 'plan.json'}"
        job = Job(network, None, BATCH, warmups=1, steps=STEPS - 1, seed=SEED, save=out / name)
        jobs.append((job, synchronisation(schedule, layers, workers, BATCH)))
    train(jobs, layers, [Place()] * (workers + 1), timeout_s=200)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WORKERS/SCHEDULE/gradients-STEP-rankRANK.npz and weights-rankRANK.npz, of every schedule."""
    out = tmp_path_factory.mktemp("trained")
    for workers in WORKERS:
        folder = out / str(workers)
        folder.mkdir()
        run(ON_ONE_TEAM, workers, folder)
        for name in ON_OTHERS:
            run([name], workers, folder)
    return out


def largest_error(found: Path, wanted: Path) -> float:
    """Over tensors, |a - b| / |b|; the names must be the same."""
    a, b = np.load(found), np.load(wanted)
    assert set(a) == set(b)
    return max(
        float(np.linalg.norm(a[name] - b[name]) / max(np.linalg.norm(b[name]), 1e-30))
        for name in b
        if np.any(b[name]) or np.any(a[name])
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("schedule", DENSE)
def test_the_averages_are_those_of_one_process(schedule: str, workers: int, reference: Path, trained: Path) -> None:
    for step in range(STEPS):
        for rank in range(workers):
            found = trained / str(workers) / schedule / f"gradients-{step}-rank{rank}.npz"
            assert largest_error(found, reference / f"dense-{workers}-{step}.npz") <= TOLERANCE


@pytest.mark.parametrize("workers", WORKERS)
def test_sparse_sends_the_largest_chunks_and_keeps_the_rest(workers: int, reference: Path, trained: Path) -> None:
    for step in range(STEPS):
        wanted = reference / f"sparse-{workers}-{step}.npz"
        arrays = np.load(wanted)
        zeros = np.mean(np.concatenate([arrays[name].ravel() == 0 for name in arrays]))
        assert 0.2 < zeros < 0.8, "the test is of something sparse"
        for rank in range(workers):
            found = trained / str(workers) / "sparse=0.5" / f"gradients-{step}-rank{rank}.npz"
            assert largest_error(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("workers", WORKERS)
def test_local_sgd_averages_weights_every_period(workers: int, reference: Path, trained: Path) -> None:
    folder = trained / str(workers) / "local_sgd=2"
    # Three steps, averaged after the second: rank 0's third step is its own, as the reference's first worker's is.
    assert largest_error(folder / "weights-rank0.npz", reference / f"local-{workers}.npz") <= TOLERANCE
    own, other = (np.load(folder / f"weights-rank{rank}.npz") for rank in range(2))
    assert any(not np.array_equal(own[name], other[name]) for name in own)


def test_branches_do_not_change_the_order_of_messages(tmp_path: Path) -> None:
    run(["wait_free"], 2, tmp_path, networks.build("googlenet", width=0.1, depth=1, image=64))
    first, second = (np.load(tmp_path / f"wait_free/gradients-0-rank{rank}.npz") for rank in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


# --------------------------------------------------------------------------------------------------- bytes on the wire

SIZES = (40_000, 400_000, 1_600_000, 8_000)


def profile(seconds: float = 0.0) -> LayerProfile:
    zeros = np.zeros(len(SIZES))
    names = tuple(f"fc{number}" for number in range(len(SIZES)))
    times = np.full(len(SIZES), seconds)
    return LayerProfile("planted", "planted", BATCH, names, times, times, np.array(SIZES, float), zeros)


PLANTED = [Learnable(f"fc{number}", size) for number, size in enumerate(SIZES)]
WITH_A_DENSE = [*PLANTED[:2], Learnable("fc2", SIZES[2], (1000, 400)), PLANTED[3]]


@pytest.fixture(scope="module")
def linked() -> Iterator[Links]:
    try:
        shaped.check_able()
    except InputError as error:
        pytest.skip(str(error))
    with shaped.links(4, None) as made:
        yield made


@pytest.mark.parametrize(
    ("schedules", "workers"),
    [
        (("end_of_backward", "buckets=500000", "lazy=500000", "sparse=0.8", "local_sgd=2"), 3),
        (("wait_free", "sufficient_factors"), 4),
        (("ps_central",), 3),
        (("ps_sharded",), 3),
        (("hierarchical=2",), 4),
    ],
)
def test_what_each_node_sends_is_the_closed_form_and_headers(
    linked: Links, schedules: tuple[str, ...], workers: int
) -> None:
    job = Job(None, profile(), BATCH, warmups=2, steps=6)
    jobs = [(job, synchronisation(schedule, WITH_A_DENSE, workers, BATCH)) for schedule in schedules]
    answers = train(jobs, WITH_A_DENSE, linked.places, timeout_s=120)
    for answer, (_, sync) in zip(answers, jobs, strict=True):
        assert answer.sent_bytes is not None
        assert len(answer.sent_bytes) == len(set(sync.nodes[:workers]))
        for found, wanted in zip(answer.sent_bytes, sync.sent_bytes, strict=False):
            # 66 bytes of headers in 1514, acknowledgements of what comes in, a few small messages of each exchange.
            assert wanted <= found <= 1.08 * wanted + 20_000, sync.label


def test_factors_are_sent_where_they_are_fewer_bytes() -> None:
    sync = synchronisation("sufficient_factors", WITH_A_DENSE, 3, BATCH)
    assert sync.told["factored"] == [2]
    factors = 2 * BATCH * 1400 * 4
    others = 4 / 3 * (SIZES[0] + SIZES[1] + SIZES[3])
    assert sync.sent_bytes == pytest.approx([factors + others] * 3)
    assert synchronisation("sufficient_factors", WITH_A_DENSE, 3, 10_000).told["factored"] == []


# ----------------------------------------------------------------------------------------------------- replayed passes


def test_a_replayed_step_takes_no_less_than_its_profile_and_its_gradients_travel() -> None:
    each_s = 0.01
    sync = synchronisation("wait_free", PLANTED, 2, BATCH)
    job = Job(None, profile(each_s), BATCH, warmups=1, steps=3)
    (answers,) = train([(job, sync)], PLANTED, [Place()] * 2, timeout_s=60)
    for answer in answers.workers:
        for step in answer["steps"]:
            assert step["backward_s"] - step["start_s"] >= 2 * len(SIZES) * each_s - 1e-6
            assert step["cpu_s"] < 2 * len(SIZES) * each_s, "waiting leaves the core to others"
        assert [number for number, _, _ in answer["exchanges"]] == [0, 1, 2, 3]
        # the last layer's gradient is sent before the first one's exists
        assert answer["exchanges"][0][1] < answer["steps"][-1]["backward_s"]


@pytest.mark.parametrize("schedule", ["buckets=500000", "ps_sharded", "local_sgd=2"])
def test_a_profile_is_replayed_under_other_engines_too(schedule: str) -> None:
    sync = synchronisation(schedule, PLANTED, 2, BATCH)
    (answers,) = train([(Job(None, profile(0.005), BATCH, 1, 2), sync)], PLANTED, [Place()] * 2, timeout_s=60)
    for step in answers.workers[0]["steps"]:
        assert step["end_s"] - step["start_s"] >= 2 * len(SIZES) * 0.005 - 1e-6


# ----------------------------------------------------------------------------------------------------------- failures


def test_a_killed_rank_ends_the_run_with_its_name() -> None:
    sync = synchronisation("wait_free", PLANTED, 2, BATCH)
    pids: list[int] = []
    moments: list[float] = []

    def kill_later(started: list[int]) -> None:
        pids.extend(started)

        def kill() -> None:
            time.sleep(4)
            moments.append(time.monotonic())
            os.kill(pids[1], signal.SIGKILL)

        threading.Thread(target=kill).start()

    with pytest.raises(RunFailed, match=r"^rank 1 was ended by SIGKILL"):
        train([(Job(None, profile(0.01), BATCH, 1, 10_000), sync)], PLANTED, [Place()] * 2, started=kill_later)
    assert time.monotonic() - moments[0] < 10
    assert gone(pids)


def test_a_rank_that_raises_is_one_line_with_its_reason() -> None:
    sync = synchronisation("wait_free", LAYERS, 2, BATCH)
    with pytest.raises(RunFailed, match=r"rank \d ended with status 1; it said last: .*No such file") as found:
        train([(Job(NETWORK, None, BATCH, 1, 1, save=Path("/nowhere")), sync)], LAYERS, [Place()] * 2, timeout_s=60)
    assert "\n" not in str(found.value)


def test_a_taken_port_and_a_host_without_an_address_are_told_before_anything_starts() -> None:
    sync = synchronisation("wait_free", PLANTED, 2, BATCH)
    job = Job(None, profile(), BATCH, 1, 1)
    with listening(Place()) as other:
        taken = other.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1, port {taken}: Address already in use"):
            train([(job, sync)], PLANTED, [Place()] * 2, port=taken)
    with pytest.raises(InputError, match=r"host = 'no-such-host\.invalid': does not resolve"):
        train([(job, sync)], PLANTED, [Place()] * 2, host="no-such-host.invalid")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("fastest", "schedule = 'fastest': unknown; known are end_of_backward, "),
        ("wait_free=3", "schedule = 'wait_free=3': takes no value"),
        ("buckets=0", "its value must be a whole number from 1 to"),
        ("sparse=1", "its value must be a number from 0 to 0.9999"),
        ("hierarchical=2", "3 workers do not make whole nodes of 2"),
        ("local_sgd=x", "its value must be a whole number from 1 to"),
        ("merged", "needs its plan; write merged=FILE"),
        ("merged=/nowhere.json", "/nowhere.json: cannot be read"),
    ],
)
def test_a_schedule_that_is_none_is_one_line(schedule: str, said: str) -> None:
    with pytest.raises(InputError) as found:
        synchronisation(schedule, PLANTED, 3, BATCH)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["fc3"], ["fc2", "fc1"]], "3 layers where the network has 4"),
        ([["fc2"], ["fc3", "fc1", "fc0"]], "'fc2' where 'fc3' belongs"),
        ([["fc3"], []], "must be a list of lists of layer names"),
        ("fc3", "must be a list of lists of layer names"),
    ],
)
def test_a_plan_that_does_not_fit_the_network_is_one_line(groups: object, said: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"groups": groups}))
    with pytest.raises(InputError, match=said):
        synchronisation(f"merged={plan}", PLANTED, 3, BATCH)


def test_the_groups_of_a_plan_are_the_models_ends(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"groups": [["fc3"], ["fc2", "fc1"], ["fc0"]]}))
    sync = synchronisation(f"merged={plan}", PLANTED, 3, BATCH)
    assert sync.ends == (1, 3, 4)
    assert sync.told["groups"] == [[3], [2, 1], [0]]
    assert sync.label.startswith("merged=3-")
    assert synchronisation("lazy=1000000", PLANTED, 3, BATCH).ends == (2, 4)
