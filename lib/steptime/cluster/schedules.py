"""Synchronisation schedules as what the ranks are told: groups of layers, how each is exchanged, and by how many ranks.

A schedule is written NAME or NAME=VALUE:

end_of_backward          one message, after backward
layers_after_backward    a message a layer, after backward
wait_free                a message a layer, as soon as its gradient exists
buckets=BYTES            torch's DistributedDataParallel with buckets of so many bytes [25 MiB]
lazy=BYTES               messages of at least so many bytes, the pool of GradientFlow [25 MiB]
merged=FILE              the groups of a plan: JSON {"groups": [[layer, ...], ...]}, the network's last layer first
ps_central               push to one parameter server on a node of its own, pull the mean; a message a layer
ps_sharded               the same with a server on every worker's node, each with a part of every layer
sufficient_factors       wait-free; a dense layer sends its gradient's factors where these are fewer bytes
sparse=SHARE             this share of the gradients' chunks is not sent, but kept for the next step [0.9]
hierarchical=RANKS       nodes of so many ranks: sum in the node, all-reduce among nodes, broadcast [2]; one message
local_sgd=STEPS          weights averaged every so many steps, no gradients [4]
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from steptime.core.errors import InputError
from steptime.core.files import read_json
from steptime.core.network import Network
from steptime.core.step import LayerProfile

VALUE_BYTES = 4
BUCKET_BYTES = 25 * 2**20
CHUNK_VALUES = 8192
"""GradientFlow's chunks have 32 KiB of float32."""


@dataclass(frozen=True)
class Learnable:
    """A layer with parameters; `dense` is (out, in) features of a dense one."""

    name: str
    n_bytes: int
    dense: tuple[int, int] | None = None


@dataclass(frozen=True)
class Synchronisation:
    """What the ranks of one run do. `told` goes to them as JSON; `servers` ranks stand behind the `workers`; `nodes`:
    the node of each rank; `sent_bytes`: what each node's interface sends in a step by the closed form, without headers.
    """

    schedule: str
    workers: int
    servers: int
    nodes: tuple[int, ...]
    told: dict[str, Any] = field(hash=False)
    sent_bytes: tuple[float, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The groups as the models have them: how many layers have been sent after each, in sending order."""
        return tuple(accumulate(len(group) for group in self.told["groups"]))

    @property
    def label(self) -> str:
        """The schedule in a name; of a plan its number of messages and a hash, not its file."""
        if not self.schedule.startswith("merged="):
            return self.schedule
        return f"merged={len(self.ends)}-{hashlib.sha256(repr(self.ends).encode()).hexdigest()[:6]}"


def learnable_of(network: Network) -> list[Learnable]:
    """The network's learnable layers in forward order."""
    return [
        Learnable(
            layer.name,
            layer.parameter_count * VALUE_BYTES,
            (layer.parameters[0].shape[0], layer.parameters[0].shape[1]) if layer.kind == "dense" else None,
        )
        for layer in network.layers
        if layer.parameters
    ]


def learnable_in(profile: LayerProfile, network: Network | None = None) -> list[Learnable]:
    """The profile's learnable layers in forward order; which are dense says `network`, if it is that one's profile."""
    dense = {layer.name: layer.dense for layer in learnable_of(network)} if network else {}
    pairs = zip(profile.layers, profile.parameter_bytes, strict=True)
    return [Learnable(name, int(size), dense.get(name)) for name, size in pairs if size]


def synchronisation(schedule: str, layers: Sequence[Learnable], workers: int, batch: int) -> Synchronisation:
    """The schedule written `schedule` for these layers. Raises InputError for one that is unknown or does not fit."""
    name, _, value = schedule.partition("=")
    if name not in _MAKERS:
        raise InputError(f"schedule = {schedule!r}: unknown; known are {', '.join(_MAKERS)}")
    if workers < 1:
        raise InputError(f"workers = {workers}: must be at least 1")
    if not layers:
        raise InputError("the network has no parameters: there is nothing to synchronise")
    return _MAKERS[name](_Given(schedule, value, tuple(layers), workers, batch))


# --------------------------------------------------------------------------------------------- one function a schedule


@dataclass(frozen=True)
class _Given:
    schedule: str
    value: str
    layers: tuple[Learnable, ...]
    workers: int
    batch: int

    @property
    def one_a_layer(self) -> list[list[int]]:
        return [[number] for number in reversed(range(len(self.layers)))]

    @property
    def all_in_one(self) -> list[list[int]]:
        return [list(reversed(range(len(self.layers))))]

    @property
    def total_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers)

    def no_value(self) -> None:
        if self.value:
            raise InputError(f"schedule = {self.schedule!r}: takes no value; leave it out")

    def number(self, default: float, least: float, most: float, *, whole: bool = True) -> float:
        try:
            number = float(self.value) if self.value else default
        except ValueError:
            number = least - 1
        if not least <= number <= most or (whole and number != int(number)):
            kind = "whole number" if whole else "number"
            raise InputError(f"schedule = {self.schedule!r}: its value must be a {kind} from {least:g} to {most:g}")
        return number

    def made(self, exchange: str, groups: list[list[int]], sent: Sequence[float], **more: Any) -> Synchronisation:
        after, servers, nodes = more.pop("after", False), more.pop("servers", 0), more.pop("nodes", None)
        told = {"exchange": exchange, "groups": groups, "after_backward": after, "servers": servers, **more}
        where = tuple(range(self.workers)) if nodes is None else tuple(nodes)
        return Synchronisation(self.schedule, self.workers, servers, where, told, tuple(sent))

    def all_reduced(self, groups: list[list[int]], *, after: bool = False) -> Synchronisation:
        return self.made("all_reduce", groups, [ring_bytes(self.total_bytes, self.workers)] * self.workers, after=after)


def ring_bytes(n_bytes: float, workers: int) -> float:
    """What each of `workers` sends in a ring all-reduce of n bytes: 2 (N - 1) / N n (Patarasuk, Yuan 2009)."""
    return 2 * (workers - 1) / workers * n_bytes


def _end_of_backward(given: _Given) -> Synchronisation:
    given.no_value()
    return given.all_reduced(given.all_in_one, after=True)


def _layers_after_backward(given: _Given) -> Synchronisation:
    given.no_value()
    return given.all_reduced(given.one_a_layer, after=True)


def _wait_free(given: _Given) -> Synchronisation:
    given.no_value()
    return given.all_reduced(given.one_a_layer)


def _pooled(given: _Given, least_bytes: float) -> list[list[int]]:
    """Groups in sending order, each closed by the layer that fills it."""
    groups: list[list[int]] = [[]]
    held = 0
    for number in reversed(range(len(given.layers))):
        groups[-1].append(number)
        held += given.layers[number].n_bytes
        if held >= least_bytes:
            groups.append([])
            held = 0
    return [group for group in groups if group]


def _buckets(given: _Given) -> Synchronisation:
    size = int(given.number(BUCKET_BYTES, 1, 2**40))
    sent = [ring_bytes(given.total_bytes, given.workers)] * given.workers
    return given.made("buckets", _pooled(given, size), sent, bucket_bytes=size)


def _lazy(given: _Given) -> Synchronisation:
    return given.all_reduced(_pooled(given, given.number(BUCKET_BYTES, 1, 2**40)))


def _merged(given: _Given) -> Synchronisation:
    if not given.value:
        raise InputError("schedule = 'merged': needs its plan; write merged=FILE")
    plan = read_json(Path(given.value))
    groups = plan.get("groups") if isinstance(plan, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
        raise InputError(f"{given.value}: key 'groups' must be a list of lists of layer names; correct it")
    named = [name for group in groups for name in group]
    expected = [layer.name for layer in reversed(given.layers)]
    if named != expected:
        wrong = next(
            (
                f"{found!r} where {wanted!r} belongs"
                for found, wanted in zip(named, expected, strict=False)
                if found != wanted
            ),
            f"{len(named)} layers where the network has {len(expected)}",
        )
        raise InputError(f"{given.value}: groups: has {wrong}; each learnable layer comes once, the last one first")
    numbers = {layer.name: number for number, layer in enumerate(given.layers)}
    return given.all_reduced([[numbers[name] for name in group] for group in groups])


def _ps_central(given: _Given) -> Synchronisation:
    given.no_value()
    sent = [float(given.total_bytes)] * given.workers + [float(given.total_bytes * given.workers)]
    nodes = range(given.workers + 1)
    return given.made("server", given.one_a_layer, sent, servers=1, nodes=nodes)


def _ps_sharded(given: _Given) -> Synchronisation:
    """Nodes send alike but for layers that do not divide evenly, whose first parts are one value longer."""
    given.no_value()
    workers = given.workers
    sent = [0.0] * workers
    for layer in given.layers:
        values, longer = divmod(layer.n_bytes // VALUE_BYTES, workers)
        parts = [VALUE_BYTES * (values + (server < longer)) for server in range(workers)]
        for node in range(workers):
            sent[node] += sum(parts) - parts[node] + (workers - 1) * parts[node]
    nodes = [*range(workers), *range(workers)]
    return given.made("server", given.one_a_layer, sent, servers=workers, nodes=nodes)


def _sufficient_factors(given: _Given) -> Synchronisation:
    """Poseidon's rule (Zhang et al., arXiv 1706.03292): K (M + N) (P - 1) <= 2 n (P - 1) / P, against a ring here."""
    given.no_value()
    factored, sent = [], 0.0
    for number, layer in enumerate(given.layers):
        ring = ring_bytes(layer.n_bytes, given.workers)
        factors = (given.workers - 1) * given.batch * sum(layer.dense) * VALUE_BYTES if layer.dense else float("inf")
        if factors <= ring:
            factored.append(number)
        sent += min(factors, ring)
    return given.made("factors", given.one_a_layer, [sent] * given.workers, factored=factored)


def _sparse(given: _Given) -> Synchronisation:
    """One pool, after backward: the norms of all chunks, then the chosen ones. The last chunk may be shorter."""
    sparsity = given.number(0.9, 0.0, 0.9999, whole=False)
    chunks = -(-given.total_bytes // (CHUNK_VALUES * VALUE_BYTES))
    chosen = max(1, round((1 - sparsity) * chunks))
    least = min(given.total_bytes, chosen * CHUNK_VALUES * VALUE_BYTES)
    sent = ring_bytes(chunks * VALUE_BYTES + least, given.workers)
    options = {"sparsity": sparsity, "chunk_values": CHUNK_VALUES, "after": True}
    return given.made("sparse", given.all_in_one, [sent] * given.workers, **options)


def _hierarchical(given: _Given) -> Synchronisation:
    per_node = int(given.number(2, 1, 64))
    if given.workers % per_node:
        raise InputError(
            f"schedule = {given.schedule!r}: {given.workers} workers do not make whole nodes of {per_node}; change one"
        )
    count = given.workers // per_node
    sent = [ring_bytes(given.total_bytes, count)] * count
    nodes = [worker // per_node for worker in range(given.workers)]
    return given.made("hierarchical", given.all_in_one, sent, after=True, nodes=nodes, per_node=per_node)


def _local_sgd(given: _Given) -> Synchronisation:
    period = int(given.number(4, 1, 10_000))
    sent = [ring_bytes(given.total_bytes, given.workers) / period] * given.workers
    return given.made("local", [], sent, period=period)


_MAKERS: dict[str, Callable[[_Given], Synchronisation]] = {
    "end_of_backward": _end_of_backward,
    "layers_after_backward": _layers_after_backward,
    "wait_free": _wait_free,
    "buckets": _buckets,
    "lazy": _lazy,
    "merged": _merged,
    "ps_central": _ps_central,
    "ps_sharded": _ps_sharded,
    "sufficient_factors": _sufficient_factors,
    "sparse": _sparse,
    "hierarchical": _hierarchical,
    "local_sgd": _local_sgd,
}
SCHEDULES = tuple(_MAKERS)
