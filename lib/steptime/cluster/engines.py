"""The engines of distributed training, really run: how each is started and what it is asked for.

torch_gloo               torch.distributed, by the schedules of schedules.py; the others are the frameworks' own:
tensorflow_multiworker   MultiWorkerMirroredStrategy, its ring over gRPC; schedule pack=BYTES: what it joins into one
                         message [0: everything]
mxnet_kvstore            KVStore; dist_sync=SERVERS or dist_device_sync=SERVERS: how many servers [1]
cntk_mpi                 CNTK's data-parallel learner over MPI; bits=32 or bits=1 of each gradient value [32]
chainermn_mpi            ChainerMN over MPI; naive: a message a parameter, after backward
caffe_mpi                Caffe with an all-reduce over MPI; end_of_backward: one message; wait_free: one a layer, by a
                         thread, while backward goes on

Servers are on nodes of their own. What an engine sends beyond its gradients is its own affair: `sent_bytes` of its
Synchronisation is the least that it can send.
"""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime import frameworks
from steptime.cluster import schedules, torch_gloo
from steptime.cluster.launcher import PROGRAMS, Place, Rank, RunFailed, free_ports, run_ranks
from steptime.cluster.schedules import Learnable, Synchronisation, learnable_in, learnable_of, ring_bytes
from steptime.cluster.torch_gloo import LEARNING_RATE, Answers, Job
from steptime.core.errors import InputError
from steptime.core.files import write_text
from steptime.core.network import Network
from steptime.core.step import LayerProfile

MOST_SERVERS = 16
SESSIONS = "steptime-mpi-"
"""What folders of MPI runs begin with, in the system's temporary folder; the process id of their owner follows."""
MPI_SIGNAL = re.compile(r"process rank (\d+) .*exited on signal \d+ \(([^)]*)\)")


@dataclass(frozen=True)
class Engine:
    """`setting`: the framework's, which says its interpreter; `program`: what its ranks run; `schedules`: what may be
    asked for, the usual one first; `unable`: schedules that it cannot run here, with the reason."""

    name: str
    setting: str
    program: str
    schedules: tuple[str, ...]
    of: Callable[["_Asked"], Synchronisation]
    unable: Mapping[str, str] | None = None

    @property
    def uses_mpi(self) -> bool:
        return self.program.endswith("_mpi.py")


@dataclass(frozen=True)
class _Asked:
    """A schedule NAME or NAME=VALUE for a network on so many workers."""

    schedule: str
    layers: tuple[Learnable, ...]
    workers: int

    @property
    def value(self) -> str:
        return self.schedule.partition("=")[2]

    @property
    def total_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers)

    def whole_number(self, default: int, least: int, most: int) -> int:
        if not self.value:
            return default
        if not re.fullmatch(r"\d{1,15}", self.value) or not least <= int(self.value) <= most:
            raise InputError(
                f"schedule = {self.schedule!r}: its value must be a whole number from {least} to {most}; correct it"
            )
        return int(self.value)

    def no_value(self) -> None:
        if self.value:
            raise InputError(f"schedule = {self.schedule!r}: takes no value; leave it out")

    def made(self, sent: float, servers: int = 0, groups: Sequence[Sequence[int]] = (), **told: Any) -> Synchronisation:
        """`sent`: by each worker, at least; the servers together send as much as all workers."""
        each_server = (self.workers * sent / servers,) if servers else ()
        sent_bytes = (sent,) * self.workers + each_server * servers
        told |= {"groups": [list(group) for group in groups]}
        return Synchronisation(
            self.schedule, self.workers, servers, tuple(range(self.workers + servers)), told, sent_bytes
        )

    @property
    def ring(self) -> float:
        return ring_bytes(self.total_bytes, self.workers)


def _tensorflow(asked: _Asked) -> Synchronisation:
    return asked.made(asked.ring, pack_bytes=asked.whole_number(0, 0, 2**40))


def _mxnet(asked: _Asked) -> Synchronisation:
    """A worker pushes all gradients and pulls all sums; alone it has a store of its own and no server."""
    servers = asked.whole_number(1, 1, MOST_SERVERS)
    if asked.workers == 1:
        return asked.made(0.0, store="local")
    return asked.made(asked.total_bytes, servers, store=asked.schedule.partition("=")[0])


def _cntk(asked: _Asked) -> Synchronisation:
    bits = asked.whole_number(32, 1, 32)
    if bits not in (1, 32):
        raise InputError(f"schedule = {asked.schedule!r}: bits must be 1 or 32; correct it")
    return asked.made(asked.ring * bits / 32, bits=bits)


def _chainermn(asked: _Asked) -> Synchronisation:
    asked.no_value()
    return asked.made(asked.ring, communicator=asked.schedule)


def _caffe(asked: _Asked) -> Synchronisation:
    asked.no_value()
    numbers = list(reversed(range(len(asked.layers))))
    at_once = asked.schedule == "wait_free"
    groups = [[number] for number in numbers] if at_once else [numbers]
    return asked.made(asked.ring, groups=groups, at_once=at_once)


_NO_CUPY = "packs gradients in the memory of a GPU by CuPy, which a CPU build lacks"

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "tensorflow_multiworker",
            "tensorflow",
            "tensorflow_multiworker.py",
            ("pack",),
            _tensorflow,
        ),
        Engine("mxnet_kvstore", "mxnet", "mxnet_kvstore.py", ("dist_sync", "dist_device_sync"), _mxnet),
        Engine("cntk_mpi", "cntk", "cntk_mpi.py", ("bits",), _cntk),
        Engine(
            "chainermn_mpi",
            "chainer",
            "chainermn_mpi.py",
            ("naive",),
            _chainermn,
            unable=dict.fromkeys(("flat", "hierarchical", "two_dimensional", "pure_nccl"), _NO_CUPY),
        ),
        Engine("caffe_mpi", "caffe", "caffe_mpi.py", ("end_of_backward", "wait_free"), _caffe),
    )
}


def named(schedule: str) -> tuple[str, str]:
    """The engine and its schedule in ENGINE/SCHEDULE; one that names no engine is torch_gloo's.

    Raises InputError for an unknown engine.
    """
    match = re.match(r"(\w+)/", schedule)
    if match is None:
        return torch_gloo.NAME, schedule
    if match[1] != torch_gloo.NAME:
        engine_of(match[1])
    return match[1], schedule[match.end() :]


def by_engine(name: str | None, schedules: Sequence[str]) -> tuple[str, ...]:
    """The schedules, those that name no engine with `name`; all that engine's where there are none.

    Raises InputError for an unknown engine.
    """
    if name is None or name == torch_gloo.NAME:
        return tuple(schedules)
    engine = engine_of(name)
    return tuple(each if re.match(r"\w+/", each) else f"{name}/{each}" for each in schedules or engine.schedules)


def alone(schedule: str) -> str:
    """What a single worker of the schedule's engine runs: ENGINE/SCHEDULE."""
    name, _ = named(schedule)
    return f"{name}/{'end_of_backward' if name == torch_gloo.NAME else ENGINES[name].schedules[0]}"


def setting_of(name: str) -> str:
    """The framework that the engine is of."""
    return "torch" if name == torch_gloo.NAME else engine_of(name).setting


def engine_of(name: str) -> Engine:
    """One of ENGINES. Raises InputError for an unknown one."""
    if name not in ENGINES:
        raise InputError(f"engine = {name!r}: unknown; known are {', '.join((torch_gloo.NAME, *ENGINES))}")
    return ENGINES[name]


def check_installed(name: str) -> None:
    """Raise InputError with the command that mends it where the engine cannot be started on this machine."""
    setting = setting_of(name)
    if frameworks.installed_version(setting) is None:
        environment = frameworks.SETTINGS[setting].environment
        mend = f"steptime env create {environment}" if environment else "make env"
        raise InputError(f"engine = {name!r}: {setting} is not installed: {mend}")
    if name in ENGINES and ENGINES[name].uses_mpi and shutil.which("mpirun") is None:
        raise InputError(f"engine = {name!r}: mpirun is not installed: apt-get install -y openmpi-bin")


def synchronisation(name: str, schedule: str, layers: Sequence[Learnable], workers: int, batch: int) -> Synchronisation:
    """The engine's schedule written `schedule`. Raises InputError for one that is unknown or cannot run here."""
    if name == torch_gloo.NAME:
        return schedules.synchronisation(schedule, layers, workers, batch)
    engine, asked = engine_of(name), schedule.partition("=")[0]
    if engine.unable and asked in engine.unable:
        raise InputError(f"schedule = {schedule!r}: {name} cannot run it here: it {engine.unable[asked]}")
    if asked not in engine.schedules:
        raise InputError(f"schedule = {schedule!r}: unknown to {name}; known are {', '.join(engine.schedules)}")
    if workers < 1:
        raise InputError(f"workers = {workers}: must be at least 1")
    if not layers:
        raise InputError("the network has no parameters: there is nothing to synchronise")
    return engine.of(_Asked(schedule, tuple(layers), workers))


def train(
    name: str,
    job: Job,
    sync: Synchronisation,
    layers: Sequence[Learnable],
    places: Sequence[Place],
    *,
    timeout_s: float = 300.0,
    learning_rate: float = LEARNING_RATE,
    started: Callable[[list[int]], None] = lambda pids: None,
) -> Answers:
    """Run the job by the engine: node n of `sync` is at `places[n]`.

    Raises InputError for an engine that is not installed or too few places; RunFailed when a process dies. `started`
    gets the ids of what was started here; what mpirun starts ends with it.
    """
    if name == torch_gloo.NAME:
        (answers,) = torch_gloo.train([(job, sync)], layers, places, timeout_s=timeout_s, started=started)
        return answers
    engine = engine_of(name)
    check_installed(name)
    if len(places) <= max(sync.nodes):
        raise InputError(f"{sync.label}: needs {max(sync.nodes) + 1} nodes, there are links for {len(places)}")
    setting = frameworks.SETTINGS[engine.setting]
    own = {"adapter": str(setting.adapter), "mode": setting.mode, "learning_rate": learning_rate}
    told = job.told(sync, layers, places[0].interface) | own
    run = _run_mpi if engine.uses_mpi else _run_ranks
    workers = run(engine, told, sync, places, timeout_s, started)
    return Answers(workers, _sent_bytes(workers, job.steps))


def cluster_job(
    network: Network | None, profile: LayerProfile | None, schedule: str, workers: int, timed: dict[str, int], out: Path
) -> str:
    """Write the job of each rank to `out`; the command that runs one rank, for a launcher of the cluster's own.

    `timed`: batch, warmups, steps and threads. Raises InputError for schedules with servers, which are ranks of their
    own, and for engines that are not started by torchrun, Slurm or a plain mpirun.
    """
    name, own = named(schedule)
    if profile is not None:
        layers = learnable_in(profile, network)
    else:
        assert network is not None
        layers = learnable_of(network)
    sync = synchronisation(name, own, layers, workers, timed["batch"])
    if sync.servers or name not in (torch_gloo.NAME, "caffe_mpi"):
        raise InputError(
            f"schedule = {schedule!r}: a cluster's launcher starts workers only; take one of {torch_gloo.NAME} or "
            "caffe_mpi without servers"
        )
    job = Job(
        network if profile is None else None,
        profile,
        batch=timed["batch"],
        warmups=timed["warmups"],
        steps=timed["steps"],
        threads=timed["threads"],
    )
    told: Any = job.told(sync, layers, "lo")
    if name == torch_gloo.NAME:
        program, interpreter, told = "torch_gloo.py", sys.executable, [told]
    else:
        setting = frameworks.SETTINGS[ENGINES[name].setting]
        told |= {"adapter": str(setting.adapter), "mode": setting.mode, "learning_rate": LEARNING_RATE}
        program, interpreter = ENGINES[name].program, str(setting.interpreter)
    write_text(out, json.dumps(told))
    return f"{interpreter} -B {PROGRAMS / program} {out.resolve()}"


def _sent_bytes(workers: Sequence[Mapping[str, Any]], steps: int) -> tuple[float, ...] | None:
    """By worker, each on a node of its own."""
    counts = [answer["sent_bytes"] for answer in workers]
    return None if None in counts else tuple(count / steps for count in counts)


_Started = Callable[[list[int]], None]
_Workers = tuple[dict[str, Any], ...]


def _command(engine: Engine) -> tuple[str, ...]:
    return (str(frameworks.SETTINGS[engine.setting].interpreter), "-B", str(PROGRAMS / engine.program))


def _environment(engine: Engine, threads: int) -> dict[str, str]:
    """Threads bounded, no GPU, frameworks that keep quiet, and what the framework's environment needs."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}
    own = frameworks.SETTINGS[engine.setting].child_environment
    return {**{name: str(threads) for name in names}, **quiet, **own}


# -------------------------------------------------------------------------------- engines whose processes we start


def _run_ranks(
    engine: Engine,
    told: dict[str, Any],
    sync: Synchronisation,
    places: Sequence[Place],
    timeout_s: float,
    started: _Started,
) -> _Workers:
    common = _environment(engine, told["threads"])
    finding = _tf_config if engine.setting == "tensorflow" else _dmlc
    ranks = [Rank(_command(engine), place, json.dumps(told), common | own) for place, own in finding(sync, places)]
    said = run_ranks(ranks, timeout_s, started)[: sync.workers]
    return tuple(json.loads(text.splitlines()[-1]) for text in said)


def _tf_config(sync: Synchronisation, places: Sequence[Place]) -> Iterator[tuple[Place, dict[str, str]]]:
    """Each worker's place and the variable in which TensorFlow finds the others."""
    ports = free_ports(sync.workers, places[0])
    addresses = [f"{places[node].address}:{port}" for node, port in zip(sync.nodes, ports, strict=True)]
    for number, node in enumerate(sync.nodes):
        task = {"type": "worker", "index": number}
        yield places[node], {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def _dmlc(sync: Synchronisation, places: Sequence[Place]) -> Iterator[tuple[Place, dict[str, str]]]:
    """The workers, the servers, and the scheduler beside the last of these, each with what MXNet's launcher sets."""
    if not sync.servers:
        yield places[0], {"MXNET_CPU_WORKER_NTHREADS": "1"}
        return
    last = places[sync.nodes[-1]]
    roles = ["worker"] * sync.workers + ["server"] * sync.servers + ["scheduler"]
    common = {
        **{"DMLC_PS_ROOT_URI": last.address, "DMLC_PS_ROOT_PORT": str(free_ports(1, last)[0])},
        **{"DMLC_NUM_WORKER": str(sync.workers), "DMLC_NUM_SERVER": str(sync.servers)},
        # As the adapter sets it, which is loaded after MXNet here.
        "MXNET_CPU_WORKER_NTHREADS": "1",
    }
    for place, role in zip([*(places[node] for node in sync.nodes), last], roles, strict=True):
        yield place, {**common, "DMLC_ROLE": role, "DMLC_INTERFACE": place.interface, "DMLC_NODE_HOST": place.address}


# --------------------------------------------------------------------------------- engines whose ranks mpirun starts


def _run_mpi(
    engine: Engine,
    told: dict[str, Any],
    sync: Synchronisation,
    places: Sequence[Place],
    timeout_s: float,
    started: _Started,
) -> _Workers:
    """mpirun is our one rank; its ranks, and its daemons in other namespaces, have the kernel end them with it."""
    with _session() as folder:
        (folder / "job.json").write_text(json.dumps(told))
        hosts = [places[node] for node in sync.nodes]
        command = (*_mpirun(hosts, folder), *_command(engine), str(folder / "job.json"))
        environment = _environment(engine, told["threads"]) | {
            **{"STEPTIME_ANSWERS": str(folder), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
            "STEPTIME_HOSTS": json.dumps({place.address: place.namespace for place in hosts}),
        }
        try:
            run_ranks([Rank(command, places[0], environment=environment)], timeout_s, started)
        except RunFailed as error:
            raise _mpi_failure(error, folder) from None
        return tuple(json.loads((folder / f"{number}.json").read_text()) for number in range(sync.workers))


def _mpirun(hosts: Sequence[Place], folder: Path) -> tuple[str, ...]:
    """Over TCP also on one machine, as between machines; a rank that waits gives up its core."""
    interface = hosts[0].interface
    settings = {
        **{"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": interface, "oob_tcp_if_include": interface},
        **{"mpi_yield_when_idle": "1", "orte_tmpdir_base": str(folder)},
        # Ranks end with the thread that starts them, which must be mpirun's own.
        "odls_base_num_threads": "0",
    }
    slots: tuple[str, ...] = ()
    if hosts[0].namespace is not None:
        # mpirun splits what it uses for ssh at spaces, which paths may have: a script without any stands for it.
        agent = folder / "agent"
        agent.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SB "{PROGRAMS / "enter.py"}" "$@"\n')
        agent.chmod(0o700)
        settings |= {"plm_rsh_agent": str(agent), "plm_rsh_no_tree_spawn": "1"}
        slots = ("--host", ",".join(f"{place.address}:1" for place in hosts), "--leave-session-attached")
    options = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return ("mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(len(hosts)), *slots, *options)


@contextmanager
def _session() -> Iterator[Path]:
    """A folder for one run of mpirun; those that killed runs left are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{SESSIONS}*"):
        owner = left.name.removeprefix(SESSIONS).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SESSIONS}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _mpi_failure(error: RunFailed, folder: Path) -> RunFailed:
    """Which rank failed and why, where mpirun or a rank has said so, and without this machine's name."""
    text = str(error)
    if match := MPI_SIGNAL.search(text):
        return RunFailed(f"rank {match[1]} was ended by a signal: {match[2]}", int(match[1]))
    failed = sorted(folder.glob("*.failed"), key=lambda path: path.stat().st_mtime)
    if failed:
        number = failed[0].name.partition(".")[0]
        return RunFailed(f"rank {number} failed: {failed[0].read_text()[:300]}", int(number))
    text = text.replace("rank 0", "mpirun", 1) if error.rank == 0 else text
    return RunFailed(text.replace(socket.gethostname(), "this machine"), None)
