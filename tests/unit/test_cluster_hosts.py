"""Ranks that a cluster's own launcher starts, over two namespaces as two hosts: the commands that README gives."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from steptime.cluster import engines
from steptime.cluster import links as shaped
from steptime.cluster.launcher import PROGRAMS, Place, Rank, free_ports, run_ranks
from steptime.core.errors import InputError

PROGRAM = str(PROGRAMS / "torch_gloo.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Place, ...]]:
    try:
        shaped.check_able()
    except InputError as error:
        pytest.skip(str(error))
    with shaped.links(2, None) as made:
        yield made.places


def job_command(schedule: str, job: Path) -> subprocess.CompletedProcess[str]:
    executable = str(Path(sys.executable).with_name("steptime"))
    options = ["--network", "lenet", "--workers", "2", "--schedule", schedule, "--batch", "4"]
    command = [executable, "workers", "job", *options, "--steps", "2", "--warmups", "1", "--out", str(job)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def written(folder: Path, schedule: str) -> Path:
    """A job of two workers by `steptime workers job`, whose averages are kept in `folder`."""
    job = folder / "job.json"
    done = job_command(schedule, job)
    assert done.returncode == 0, done.stderr
    assert str(job) in done.stdout
    told = json.loads(job.read_text())
    for each in told if isinstance(told, list) else [told]:
        each["save"] = str(folder)
    job.write_text(json.dumps(told))
    return job


def same_averages(folder: Path) -> bool:
    ranks = [np.load(folder / f"gradients-1-rank{rank}.npz") for rank in range(2)]
    return all(np.any(ranks[0][name]) for name in ranks[0]) and all(
        np.array_equal(ranks[0][name], ranks[1][name]) for name in ranks[0]
    )


def test_torchrun_meets_over_two_hosts(hosts: tuple[Place, ...], tmp_path: Path) -> None:
    job = written(tmp_path, "wait_free")
    endpoint = f"{hosts[0].address}:{free_ports(1, hosts[0])[0]}"
    ranks = []
    for number, place in enumerate(hosts):
        # A namespace has the machine's host name, by which torchrun would tell whether the meeting place is here.
        is_first = ("--rdzv-conf", f"is_host={str(number == 0).lower()}")
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", place.address)
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            *is_first,
            *meeting,
        )
        ranks.append(
            Rank(
                (*torchrun, PROGRAM, str(job)),
                place,
                environment={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )
        )
    said = run_ranks(ranks, 120)
    answers = [json.loads(next(line for line in text.splitlines() if line.startswith("[")))[0] for text in said]
    assert [len(answer["steps"]) for answer in answers] == [3, 3]
    assert same_averages(tmp_path)


def test_slurm_s_variables_are_enough(hosts: tuple[Place, ...], tmp_path: Path) -> None:
    """What srun runs on each host; Slurm itself is not needed for it."""
    job = written(tmp_path, "end_of_backward")
    line = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {sys.executable} -B {PROGRAM} {job}"
    common = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_ports(1, hosts[0])[0])}
    common |= {"SLURM_NTASKS": "2", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = [
        Rank(("sh", "-c", line), place, environment=common | {"SLURM_PROCID": str(number)})
        for number, place in enumerate(hosts)
    ]
    said = run_ranks(ranks, 120)
    assert [len(json.loads(text.splitlines()[-1])[0]["steps"]) for text in said] == [3, 3]
    assert same_averages(tmp_path)


def test_mpirun_starts_caffe_s_ranks_on_two_hosts(hosts: tuple[Place, ...], tmp_path: Path) -> None:
    """Its daemons are started by the namespaces' stand-in for ssh."""
    try:
        engines.check_installed("caffe_mpi")
    except InputError as error:
        pytest.skip(str(error))
    job = written(tmp_path, "caffe_mpi/wait_free")
    command = engines._command(engines.ENGINES["caffe_mpi"])
    environment = engines._environment(engines.ENGINES["caffe_mpi"], 1) | {
        **{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        "STEPTIME_HOSTS": json.dumps({place.address: place.namespace for place in hosts}),
    }
    run_ranks([Rank((*engines._mpirun(hosts, tmp_path), *command, str(job)), hosts[0], environment=environment)], 120)
    assert same_averages(tmp_path)


@pytest.mark.parametrize("schedule", ["ps_central", "mxnet_kvstore/dist_sync", "cntk_mpi/bits"])
def test_what_a_cluster_s_launcher_cannot_start_is_one_line(schedule: str, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    done = job_command(schedule, job)
    assert done.returncode == 2
    assert "a cluster's launcher starts workers only" in done.stderr
    assert not job.exists()
