"""The engine torch.distributed with gloo: one run of all ranks, and what they answered."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from steptime import frameworks
from steptime.cluster.launcher import PROGRAMS, Place, Rank, listening, resolved, run_ranks
from steptime.cluster.schedules import Learnable, Synchronisation
from steptime.core.errors import InputError
from steptime.core.network import Network
from steptime.core.step import LayerProfile

NAME = "torch_gloo"
ADAPTER = frameworks.SETTINGS["torch"].adapter
LEARNING_RATE = 0.01
WORKER = Path(frameworks.__file__).with_name("worker.py")


@dataclass(frozen=True)
class Job:
    """What every worker does: train `network`, or replay `profile` (of that network, if given) by waiting."""

    network: Network | None
    profile: LayerProfile | None
    batch: int
    warmups: int
    steps: int
    seed: int = 1
    threads: int = 1
    save: Path | None = None

    def told(self, synchronisation: Synchronisation, layers: Sequence[Learnable], interface: str) -> dict[str, Any]:
        """The job as the ranks' program reads it. Loopback's bytes are everybody's and are not counted."""
        return {
            "network": None if self.network is None else asdict(self.network),
            "profile": None if self.profile is None else _told_profile(self.profile, layers),
            **{"batch": self.batch, "seed": self.seed, "threads": self.threads, "learning_rate": LEARNING_RATE},
            **{"warmups": self.warmups, "steps": self.steps, "workers": synchronisation.workers},
            "synchronisation": synchronisation.told,
            **{"adapter": str(ADAPTER), "worker": str(WORKER)},
            "interface": None if interface == "lo" else interface,
            "save": None if self.save is None else str(self.save),
        }


@dataclass(frozen=True)
class Answers:
    """What the workers answered, and the sent bytes a step of each node's interface (None over loopback)."""

    workers: tuple[dict[str, Any], ...] = field(repr=False)
    sent_bytes: tuple[float, ...] | None


def train(
    jobs: Sequence[tuple[Job, Synchronisation]],
    layers: Sequence[Learnable],
    places: Sequence[Place],
    *,
    timeout_s: float = 300.0,
    host: str | None = None,
    port: int = 0,
    started: Callable[[list[int]], None] = lambda pids: None,
) -> list[Answers]:
    """Run the jobs, one after the other, on the same ranks: node n of their synchronisations is at `places[n]`.

    The ranks meet at the first place, at a free port; `host` is another name for its address. Raises InputError for a
    host that does not resolve, a port that is taken, too few places, jobs for other ranks; RunFailed when a rank dies.
    """
    nodes = jobs[0][1].nodes
    if any(sync.nodes != nodes or sync.workers != jobs[0][1].workers for _, sync in jobs):
        raise InputError("jobs: are for different ranks; start each by itself")
    if len(places) <= max(nodes):
        raise InputError(f"{jobs[0][1].label}: needs {max(nodes) + 1} nodes, there are links for {len(places)}")
    told = [job.told(sync, layers, places[0].interface) for job, sync in jobs]
    said = run_gloo(
        "torch_gloo.py",
        told,
        [places[node] for node in nodes],
        threads=jobs[0][0].threads,
        timeout_s=timeout_s,
        host=host,
        port=port,
        started=started,
    )
    answers = []
    for number, (job, sync) in enumerate(jobs):
        workers = tuple(each[number] for each in said[: sync.workers])
        answers.append(Answers(workers, _sent_bytes(workers, sync, job.steps)))
    return answers


def run_gloo(
    program: str,
    told: Any,
    places: Sequence[Place],
    *,
    threads: int = 1,
    timeout_s: float,
    host: str | None = None,
    port: int = 0,
    started: Callable[[list[int]], None] = lambda pids: None,
) -> list[Any]:
    """The answer of each rank of one of the gloo programs, a rank a place. Raises as `train` does."""
    first = places[0] if host is None else Place(places[0].namespace, places[0].interface, resolved(host))
    command = (sys.executable, "-B", str(PROGRAMS / program))
    with listening(first, port) as server:
        common = _environment(threads) | {
            **{"MASTER_ADDR": first.address, "MASTER_PORT": str(server.getsockname()[1])},
            **{"WORLD_SIZE": str(len(places)), "STEPTIME_LISTENING": str(server.fileno())},
        }
        ranks = []
        for number, place in enumerate(places):
            own = {"RANK": str(number), "GLOO_SOCKET_IFNAME": place.interface}
            handles = (server.fileno(),) if number == 0 else ()
            ranks.append(Rank(command, place, json.dumps(told), common | own, handles))
        return [json.loads(text.splitlines()[-1]) for text in run_ranks(ranks, timeout_s, started)]


def _sent_bytes(workers: Sequence[dict[str, Any]], sync: Synchronisation, steps: int) -> tuple[float, ...] | None:
    """By node, in a step; a node of a server alone is not counted."""
    counts = {node: answer["sent_bytes"] for node, answer in zip(sync.nodes, workers, strict=False)}
    if None in counts.values():
        return None
    return tuple(counts[node] / steps for node in sorted(counts))


def _told_profile(profile: LayerProfile, layers: Sequence[Learnable]) -> dict[str, Any]:
    dense = {layer.name: layer.dense for layer in layers}
    columns = (profile.layers, profile.forward_s, profile.backward_s, profile.parameter_bytes)
    rows = [
        {
            "layer": name,
            "forward_s": float(forward_s),
            "backward_s": float(backward_s),
            "parameter_bytes": int(size),
            "dense": dense.get(name),
        }
        for name, forward_s, backward_s, size in zip(*columns, strict=True)
    ]
    return {"layers": rows, "input_s": profile.t_io_s + profile.t_h2d_s, "update_s": profile.t_u_s}


def _environment(threads: int) -> dict[str, str]:
    """Threads bounded, no GPU, and gloo's harmless warnings about names that no server knows left out."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**{name: str(threads) for name in names}, "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
