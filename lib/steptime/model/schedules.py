"""Task graphs of one training step under each schedule: who waits for what, on which resource.

Workers that do the same at the same time are folded into one of the graph, which `TaskGraph.stands_for` counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.core.step import LayerProfile, Schedule
from steptime.model.collectives import AllReduce, Cost, line, ring
from steptime.model.exchanges import CentralServer, Collective, Exchange, ShardedServer, Stage
from steptime.model.step import AFTER_BACKWARD, Messages, messages
from steptime.model.tasks import GraphBuilder, TaskGraph


@dataclass(frozen=True)
class Late:
    """A worker that is not like the others: `delay_s` of its host before each forward pass, `slower` times as long for
    forward, backward and update."""

    delay_s: float = 0.0
    slower: float = 1.0


ON_TIME = Late()


@dataclass(frozen=True, eq=False)
class _Computed:
    """The tasks of the workers in a graph: `backward` (workers x layers, in sending order) and `learnable`, the places
    in it of the layers that have parameters; `reading`: what waits for the update before, if anything does."""

    backward: np.ndarray
    learnable: np.ndarray
    reading: np.ndarray | None

    def ready(self, schedule: Schedule, sent: Messages) -> np.ndarray:
        """Workers x messages: the backward task that each message waits for."""
        if schedule.aggregation in AFTER_BACKWARD:
            return np.repeat(self.backward[:, -1:], len(sent.last), axis=1)
        return self.backward[:, self.learnable[sent.last]]


def step_graph(
    profile: LayerProfile,
    schedule: Schedule,
    exchange: Exchange,
    *,
    late: Mapping[int, Late] | None = None,
    shared_cores: bool = False,
    fair: bool = False,
    folded: bool = True,
) -> TaskGraph:
    """One step of all workers of `exchange`; `late` are those that are not like the rest (by worker).

    `folded`: one worker of each kind of `Late` stands for all of that kind. It is exact: what they wait for is the same
    and comes at the same time, and on a common queue they stand one behind the other. `shared_cores`: reading uses the
    device, so nothing of it overlaps. `fair`: messages share a link equally instead of one after the other.
    """
    _check_workers(exchange.workers, late or {})
    which, workers, counts = _classes(exchange.workers, late or {}, folded)
    builder = GraphBuilder(profile.layers)
    computed = _compute(builder, profile, schedule, workers, which, shared_cores)
    sent = messages(profile, schedule, exchange.cost)
    done = computed.backward[:, -1:]
    if exchange.workers > 1 and len(sent.last):
        ready = computed.ready(schedule, sent)
        layer = _layer_of(profile, computed, sent)
        done = _exchange(builder, exchange.stages(sent.n_bytes), ready, layer, workers, counts, fair)
    _update(builder, profile, workers, which, computed, done)
    return builder.graph(counts.tolist())


def ring_graph(
    profile: LayerProfile,
    schedule: Schedule,
    workers: int,
    link: Link,
    *,
    late: Mapping[int, Late] | None = None,
    slow_links: Mapping[int, Link] | None = None,
    folded: bool = True,
) -> TaskGraph:
    """One step of `workers` that aggregate in rings, with `late` workers and `slow_links` (by the worker that sends).

    The semantics: a message of n bytes is cut into N chunks; in each of 2(N - 1) rounds worker i sends one to worker
    i + 1 over its link, in alpha + n/N beta, once it has sent the one of the round before and received that of worker
    i - 1. Receiving needs no time of the receiver and no consent (buffered). A worker begins a message when its
    gradient exists and its message before is complete: the last chunk sent and the last received. So a late worker
    holds up every other, once; a slow link is waited for in every round, but a worker d places behind it ends d rounds
    of waiting earlier, and what the others have to spare absorbs it.

    `folded`: only the workers beside an irregular one are kept (see `_kept`), else all, each send a task. Both give
    the same times. Raises InputError for a slow link that is faster than `link` in either constant.
    """
    late, slow_links = dict(late or {}), dict(slow_links or {})
    _check_workers(workers, late, slow_links)
    _check_slow(slow_links, link)
    if workers == 1 or (folded and not slow_links):
        return step_graph(profile, schedule, Collective(workers, ring(workers, link)), late=late)
    kept = _kept(workers, {*late, *slow_links}) if folded else np.arange(workers)
    builder = GraphBuilder(profile.layers)
    which = [late.get(int(worker), ON_TIME) for worker in kept]
    computed = _compute(builder, profile, schedule, kept, which)
    sent = messages(profile, schedule, ring(workers, link))
    done = computed.backward[:, -1:]
    if len(sent.last):
        ready = computed.ready(schedule, sent)
        layer = _layer_of(profile, computed, sent)
        if folded:
            late_by = _slow_ring(kept, workers, sent.n_bytes, link, slow_links)
            healthy = ring(workers, link).time_s(sent.n_bytes)
            done = _folded_rings(builder, kept, healthy, late_by, ready, layer)
        else:
            every = [slow_links.get(int(worker), link) for worker in kept]
            done = _unfolded_rings(builder, sent.n_bytes, every, ready, layer)
    _update(builder, profile, kept, which, computed, done)
    return builder.graph(_stands_for(kept, workers))


# ------------------------------------------------------------------------------------------------- computing, input


def _compute(
    builder: GraphBuilder,
    profile: LayerProfile,
    schedule: Schedule,
    workers: np.ndarray,
    which: Sequence[Late],
    shared_cores: bool = False,
) -> _Computed:
    """Reading, copying, host delay, forward and backward of each worker."""
    reading, copied = _input(builder, profile, schedule, workers, shared_cores)
    device = _each(builder, "device", workers)
    delays = np.array([each.delay_s for each in which])
    late = np.flatnonzero(delays)
    hosts = builder.add("host", device[late], delays[late], worker=workers[late])
    slower = np.array([each.slower for each in which])[:, None]
    rows, layers = workers[:, None], np.arange(len(profile.layers))
    forward = builder.add("forward", device[:, None], slower * profile.forward_s, layer=layers, worker=rows)
    times = slower * profile.backward_s[::-1]
    backward = builder.add("backward", device[:, None], times, layer=layers[::-1], worker=rows)
    if copied is not None:
        begins = forward[:, 0].copy()
        begins[late] = hosts
        builder.edge(copied, begins)
        if reading is None and schedule.copy != "with_compute":
            # a batch on the device is kept until its backward pass is over
            ahead = schedule.loaders + 1 if schedule.copy == "with_read" else 2
            builder.edge(backward[:, -1], copied, iterations=ahead)
    return _Computed(backward, np.flatnonzero(profile.parameter_bytes[::-1] > 0), reading)


def _input(
    builder: GraphBuilder, profile: LayerProfile, schedule: Schedule, workers: np.ndarray, shared_cores: bool
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Each worker's task that waits for the update before, and the one after which its batch is on the device."""
    if profile.t_io_s == profile.t_h2d_s == 0:
        return None, None
    sequential = shared_cores or not schedule.prefetch
    loaders = 1 if sequential else schedule.loaders
    copy = "own_engine" if sequential else schedule.copy
    # a loader that copies as well has two tasks a batch, so two places
    slots = 2 * loaders if copy == "with_read" else loaders
    reader = "device" if shared_cores else "input"
    copier = "device" if shared_cores else {"with_read": "input", "own_engine": "copy", "with_compute": "device"}[copy]
    engine = _each(builder, reader, workers, slots=slots)
    read = builder.add("input", engine, profile.t_io_s, worker=workers)
    copied = builder.add("h2d", _each(builder, copier, workers), profile.t_h2d_s, worker=workers)
    builder.edge(read, copied)
    if sequential:
        return read, copied
    # as many batches again as there are loaders may wait on the host; one that copies goes on when it has
    builder.edge(copied, read, iterations=loaders if copy == "with_read" else 2 * loaders)
    return None, copied


def _update(
    builder: GraphBuilder,
    profile: LayerProfile,
    workers: np.ndarray,
    which: Sequence[Late],
    computed: _Computed,
    done: np.ndarray,
) -> None:
    """Each worker's update after its row of `done`, or after the one row for all."""
    slower = np.array([each.slower for each in which])
    update = builder.add("update", _each(builder, "device", workers), slower * profile.t_u_s, worker=workers)
    builder.edge(done, update[:, None])
    if computed.reading is not None:
        builder.edge(update, computed.reading, iterations=1)


def _each(
    builder: GraphBuilder, name: str, workers: np.ndarray, discipline: str = "ordered", slots: int = 1
) -> np.ndarray:
    """The resource of that name of each worker."""
    return np.array([builder.on(name, int(worker), discipline, slots) for worker in workers])


def _layer_of(profile: LayerProfile, computed: _Computed, sent: Messages) -> np.ndarray:
    """The layer that completes each message."""
    return len(profile.layers) - 1 - computed.learnable[sent.last]


# ------------------------------------------------------------------------------------------------------ exchanging


def _exchange(
    builder: GraphBuilder,
    stages: Sequence[Stage],
    ready: np.ndarray,
    layer: np.ndarray,
    workers: np.ndarray,
    counts: np.ndarray,
    fair: bool,
) -> np.ndarray:
    """The stages of every message (`ready`: workers x messages); returns what each worker's update waits for."""
    waits = ready
    for number, stage in enumerate(stages):
        whose = workers if stage.scope == "each" else np.array([-1])
        as_they_come = stage.shared or (stage.scope == "queue" and len(workers) > 1)
        discipline = "fair" if fair else "fifo" if as_they_come else "ordered"
        engine = _each(builder, stage.resource, whose, discipline)
        tasks_of = workers if stage.scope != "all" else np.array([-1])
        many = counts[:, None] if stage.scope == "queue" else np.ones((len(tasks_of), 1))
        first, last = _sends(
            builder, np.broadcast_to(engine, len(tasks_of)), many * stage.time_s, stage.chosen_s, layer, tasks_of
        )
        if number == 0 and stage.scope != "all":
            builder.edge(waits, first)
        else:
            builder.edge(waits[:, None], first[None])
        waits = last
    return waits if stages[-1].shared or fair else waits[:, -1:]


def _sends(
    builder: GraphBuilder,
    engine: np.ndarray,
    seconds: np.ndarray,
    chosen_s: np.ndarray | None,
    layer: np.ndarray,
    whose: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """A stage's tasks, engines x messages: the first and the last of each message (one task without a selection)."""
    if chosen_s is None:
        sends = builder.add("communicate", engine[:, None], seconds, layer=layer, worker=whose[:, None])
        return sends, sends
    pairs = [
        (
            builder.add("compress", engine, chosen_s[message], layer=layer[message], worker=whose),
            builder.add("communicate", engine, seconds[:, message], layer=layer[message], worker=whose),
        )
        for message in range(seconds.shape[1])
    ]
    first, last = (np.stack(part, axis=1) for part in zip(*pairs, strict=True))
    builder.edge(first, last)
    return first, last


# ----------------------------------------------------------------------------------------------------------- rings


def _unfolded_rings(
    builder: GraphBuilder,
    n_bytes: np.ndarray,
    links: Sequence[Link],
    ready: np.ndarray,
    layer: np.ndarray,
) -> np.ndarray:
    """Every chunk that every worker sends in every round is a task on its link."""
    workers = len(links)
    everyone = np.arange(workers)
    rounds = np.arange(2 * (workers - 1))[:, None]
    engine = _each(builder, "link", everyone)
    alpha, beta = (np.array([getattr(link, name) for link in links]) for name in ("alpha_s", "beta_s_per_byte"))
    beside = np.roll(everyone, 1)  # the worker before each
    completes: list[np.ndarray] = []
    firsts: list[np.ndarray] = []
    for message, size in enumerate(n_bytes):
        times = np.broadcast_to(alpha + beta * size / workers, (len(rounds), workers))
        sends = builder.add("communicate", engine, times, layer=layer[message], worker=everyone)
        firsts.append(sends[0])
        builder.edge(ready[:, message], firsts[-1])
        builder.edge(sends[:-1, beside], sends[1:])
        if completes:
            builder.edge(completes[-1][beside], firsts[-1])
        completes.append(sends[-1])
    builder.edge(completes[-1][beside], firsts[0], iterations=1)
    return np.stack([completes[-1], completes[-1][beside]], axis=1)


def _folded_rings(
    builder: GraphBuilder,
    kept: np.ndarray,
    healthy_s: np.ndarray,
    late_by_s: np.ndarray,
    ready: np.ndarray,
    layer: np.ndarray,
) -> np.ndarray:
    """One task a message and kept worker, as long as its sends would take without slow links, and its completion.

    Completion of i waits for all kept j, `late_by_s[message, i, j]` longer (see `_slow_ring`).
    """
    engine = _each(builder, "link", kept)
    sends, complete = (np.empty(ready.shape, dtype=np.int64) for _ in range(2))
    for message in range(ready.shape[1]):
        of = {"layer": layer[message], "worker": kept}
        sends[:, message] = builder.add("communicate", engine, healthy_s[message], **of)
        complete[:, message] = builder.add("communicate", -1, np.zeros(len(kept)), **of)
    builder.edge(ready, sends)
    builder.edge(sends.T[:, None, :], complete.T[:, :, None], late_by_s)
    builder.edge(complete[:, :-1], sends[:, 1:])
    builder.edge(complete[:, -1], sends[:, 0], iterations=1)
    return complete[:, -1:]


def _kept(workers: int, irregular: set[int]) -> np.ndarray:
    """The workers that stand for all: the irregular ones and the first and last of each run of regular ones between.

    Along such a run the times at which workers begin a message never rise and are convex in the position: so they are
    after the message, since a walk (see `_slow_ring`) through the run can only be longest from one of its ends, and
    the times behind it are the maximum of lines that fall with the position. The run's ends therefore decide.
    """
    beside = {(worker + step) % workers for worker in irregular for step in (-1, 1)}
    return np.array(sorted(irregular | beside))


def _stands_for(kept: np.ndarray, workers: int) -> list[int]:
    """How many workers each kept one is: the first of a run also counts those inside it."""
    return np.diff(kept, append=kept[0] + workers).tolist()


def _slow_ring(
    kept: np.ndarray, workers: int, n_bytes: np.ndarray, link: Link, slow_links: Mapping[int, Link]
) -> np.ndarray:
    """How much longer than on equal links worker i's message takes after worker j began: messages x kept i x kept j.

    A chunk's way through the rounds is a walk along the ring: in each round it stays at a worker's link or moves to
    the next worker. With e the excess time of a link over a healthy one, the longest walk from j to i in R rounds and m
    moves adds the excesses of the m + 1 links on its way and spends the other R - 1 - m rounds at the slowest of them;
    m is the distance from j to i, or that and once around. Worker i is complete with its own last send and that of the
    worker before it, which is never the earlier one unless i's own link is slow: a walk to i has gone through i - 1.
    """
    rounds = 2 * (workers - 1)
    places = np.array(sorted(slow_links))
    excess = np.stack(
        [
            slow_links[place].alpha_s
            - link.alpha_s
            + (slow_links[place].beta_s_per_byte - link.beta_s_per_byte) * n_bytes / workers
            for place in places.tolist()
        ],
        axis=-1,
    )
    received = _longest_walks((kept - 1) % workers, kept, workers, rounds, places, excess)
    slow = np.isin(kept, places)
    sent = _longest_walks(kept[slow], kept, workers, rounds, places, excess)
    received[:, slow] = np.maximum(received[:, slow], sent)
    return received


def _longest_walks(
    ends: np.ndarray, begins: np.ndarray, workers: int, rounds: int, places: np.ndarray, excess: np.ndarray
) -> np.ndarray:
    """Messages x ends x begins: the excess of the longest walk; `excess` is messages x slow links at `places`."""
    moves = (ends[:, None] - begins) % workers
    count = len(places)
    # on its way a walk meets the slow links `first`, `first` + 1, …, `met` of them
    first = np.searchsorted(places, begins) % count
    met = ((places - begins[:, None]) % workers <= moves[:, :, None]).sum(axis=2)
    onward = excess[:, (np.arange(count)[:, None] + np.arange(count)) % count]
    nothing = np.zeros((len(excess), count, 1))
    total, slowest = (
        np.concatenate([nothing, of_links], axis=2).reshape(len(excess), -1).take(first * (count + 1) + met, axis=1)
        for of_links in (np.cumsum(onward, axis=2), np.maximum.accumulate(onward, axis=2))
    )
    direct = total + (rounds - 1 - moves) * slowest
    spare = rounds - 1 - workers - moves
    around = total + excess.sum(axis=1)[:, None, None] + spare * excess.max(axis=1)[:, None, None]
    return np.where(spare >= 0, np.maximum(direct, around), direct)


# --------------------------------------------------------------------------------------------------- other schedules


def local_sgd_graph(profile: LayerProfile, workers: int, cost: Cost, local_steps: int) -> TaskGraph:
    """`local_steps` steps without communication, then the parameters averaged in one message (Stich, arXiv
    1805.09767). One iteration of the graph is all of them."""
    if local_steps < 1:
        raise InputError(f"local_steps = {local_steps}: must be at least 1")
    builder = GraphBuilder(profile.layers)
    device, layers = builder.on("device", 0), np.arange(len(profile.layers))
    for _ in range(local_steps):
        builder.add("forward", device, profile.forward_s, layer=layers)
        builder.add("backward", device, profile.backward_s[::-1], layer=layers[::-1])
        update = builder.add("update", device, profile.t_u_s)
    if workers > 1:
        average = builder.add("communicate", builder.on("link"), cost.time_s(float(profile.parameter_bytes.sum())))
        builder.edge(update, average)
        builder.edge(average, 0, iterations=1)
    return builder.graph([workers])


def pipeline_graph(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, send_s: float = 0.0
) -> TaskGraph:
    """1F1B pipeline stages, a worker each: seconds of a stage's pass over one microbatch, `send_s` between stages.

    Stage s begins with as many forward passes as there are stages behind it, then takes one forward and one backward
    in turn, and ends with what is left; gradients are applied when all are done (PipeDream's 1F1B with a flush,
    Narayanan et al., arXiv 1806.03377 and 2006.09503). Both directions of a link send at once.
    """
    stages = len(forward_s)
    if not stages or stages != len(backward_s) or microbatches < 1:
        raise InputError(
            f"pipeline: {stages} forward, {len(backward_s)} backward times, {microbatches} microbatches: "
            "needs a time of each for every stage, and at least one microbatch"
        )
    builder = GraphBuilder(tuple(f"microbatch {number}" for number in range(microbatches)))
    forward, backward = (np.zeros((stages, microbatches), dtype=int) for _ in range(2))
    for stage in range(stages):
        device = builder.on("device", stage)
        for direction, number in _one_forward_one_backward(min(stages - 1 - stage, microbatches), microbatches):
            tasks, times = (forward, forward_s) if direction == "forward" else (backward, backward_s)
            tasks[stage, number] = builder.add(direction, device, times[stage], layer=number, worker=stage)
    numbers = np.arange(microbatches)
    for stage in range(stages - 1):
        ahead = builder.add("communicate", builder.on("link ahead", stage), send_s, layer=numbers, worker=stage)
        back = builder.add("communicate", builder.on("link back", stage + 1), send_s, layer=numbers, worker=stage + 1)
        for before, after in ((forward[stage], ahead), (ahead, forward[stage + 1])):
            builder.edge(before, after)
        for before, after in ((backward[stage + 1], back), (back, backward[stage])):
            builder.edge(before, after)
    return builder.graph()


def _one_forward_one_backward(warm_up: int, microbatches: int) -> list[tuple[str, int]]:
    order = [("forward", number) for number in range(warm_up)]
    for number in range(microbatches - warm_up):
        order += [("forward", warm_up + number), ("backward", number)]
    return order + [("backward", number) for number in range(microbatches - warm_up, microbatches)]


@dataclass(frozen=True)
class FrameworkSchedule:
    """A framework's way of training on several nodes. `checked`: whether its source could be checked."""

    schedule: Schedule
    exchange: Exchange
    source: str
    checked: bool


def framework_schedules(workers: int, link: Link, request_s: float = 0.0) -> dict[str, FrameworkSchedule]:
    """The four frameworks of the S-SGD study (arXiv 1711.05979) as schedules on one link, all with input read ahead.

    What each overlapped there is recalled but for what `source` says, so it is a model to test on the real ones.
    `request_s`: what a message costs TensorFlow's server beside the link (gRPC's copy and thread).
    """
    ring_of_all, message = Collective(workers, ring(workers, link)), line(link)
    return {
        "caffe-mpi": FrameworkSchedule(
            Schedule("wait_free", prefetch=True), ring_of_all, "NCCL all-reduce layer by layer during backward", False
        ),
        "cntk": FrameworkSchedule(
            Schedule("layers_after_backward", prefetch=True), ring_of_all, "all-reduce after backward", False
        ),
        "mxnet": FrameworkSchedule(
            Schedule("wait_free", prefetch=True),
            ShardedServer(workers, message),
            "KVStore servers, by key during backward",
            False,
        ),
        "tensorflow": FrameworkSchedule(
            Schedule("wait_free", prefetch=True),
            CentralServer(workers, AllReduce(link.alpha_s + request_s, link.beta_s_per_byte)),
            "parameter server over gRPC, as the graph allows",
            False,
        ),
    }


# ------------------------------------------------------------------------------------------------------------ checks


def _classes(workers: int, late: Mapping[int, Late], folded: bool) -> tuple[list[Late], np.ndarray, np.ndarray]:
    """The kinds of workers, the first of each, which stands for all, and how many they are."""
    if not folded:
        every = range(workers)
        return [late.get(worker, ON_TIME) for worker in every], np.array(every), np.ones(workers, dtype=int)
    found: dict[Late, list[int]] = {}
    if len(late) < workers:
        found[ON_TIME] = [next(worker for worker in range(workers) if worker not in late), workers - len(late)]
    for worker in sorted(late):
        found.setdefault(late[worker], [worker, 0])[1] += 1
    first, counts = np.array(list(found.values())).T
    return list(found), first, counts


def _check_workers(workers: int, *by_worker: Mapping[int, object]) -> None:
    if workers < 1:
        raise InputError(f"workers = {workers}: must be at least 1; correct the number")
    for worker in {key for each in by_worker for key in each}:
        if not 0 <= worker < workers:
            raise InputError(f"worker {worker}: there are {workers}, counted from 0")


def _check_slow(slow_links: Mapping[int, Link], link: Link) -> None:
    for worker, slow in slow_links.items():
        if slow.alpha_s < link.alpha_s or slow.beta_s_per_byte < link.beta_s_per_byte:
            raise InputError(
                f"slow link of worker {worker}: is faster than {link.name}; make the fastest link the common one"
            )
