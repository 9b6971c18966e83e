"""How fast the simulator is, beside plain Python doing the same work in the same run; `steptime benchmarks simulator`.

The step is ResNet-50's: 54 layers with parameters (what follows a convolution is counted to it), wait-free, ring.
"""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from steptime import networks
from steptime.core.machine import Link
from steptime.core.step import LayerProfile, Schedule
from steptime.model.flops_profile import flops_profile
from steptime.model.schedules import Late, ring_graph
from steptime.model.simulator import edges_of, simulate, simulate_events, topological_order
from steptime.model.tasks import TaskGraph
from steptime.model.what_if import what_if

LINK = Link(
    name="benchmark",
    alpha_s=4e-5,
    beta_s_per_byte=8e-10,
    source="round numbers of 10 Gbit/s Ethernet; only the cost counts",
)
SEED = 1
SYMMETRIC_WORKERS = (64, 1024, 16_384)
MOST_S = 0.050
MOST_BYTES = 200e6
MOST_GROWTH = 0.2
STRAGGLERS = 16
MOST_STRAGGLED = 3.0
UNFOLDED_WORKERS = 64
LEAST_EVENTS_PER_S = 2e6
PLAIN_WORKERS = 16
SCENARIOS = 16_384
PLAIN_SCENARIOS = 100
LEAST_EVALUATIONS_PER_S = 100e6


def simulator_speed(report: Callable[[str], None] = print) -> dict[str, Any]:
    """Times the folded step at growing numbers of workers, the unfolded one, and batched what-if; reports each.

    Returns the numbers, and in `met` whether all goals were. Every time contains building the graph but those of events
    and evaluations, which are of a graph that is there.
    """
    profile = resnet50_profile()
    rows = [_folded(profile, report), _unfolded(profile, report), _what_if(profile, report)]
    found: dict[str, Any] = {key: value for row in rows for key, value in row.items() if key != "met"}
    return found | {"met": all(row["met"] for row in rows)}


def resnet50_profile() -> LayerProfile:
    """ResNet-50 in 54 layers with parameters, 0.3 s a step of 32 samples shared out by floating-point operations."""
    network = networks.build("resnet50", size="full")
    whole = flops_profile(network, batch=32, step_s=0.3, source="floating-point operations, 0.3 s a step of 32")
    begins = [place for place, layer in enumerate(network.layers) if layer.kind in ("conv", "dense")]
    forward, backward, parameters, activations = (
        np.add.reduceat(values, begins)
        for values in (whole.forward_s, whole.backward_s, whole.parameter_bytes, whole.activation_bytes)
    )
    names = tuple(network.layers[place].name for place in begins)
    return replace(
        whole,
        layers=names,
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=parameters,
        activation_bytes=activations,
        t_u_s=1e-3,
    )


def _folded(profile: LayerProfile, report: Callable[[str], None]) -> dict[str, Any]:
    def step(workers: int, late: dict[int, Late] | None = None) -> Callable[[], Any]:
        return lambda: simulate(ring_graph(profile, Schedule(), workers, LINK, late=late))

    times = {workers: _median_s(step(workers)) for workers in SYMMETRIC_WORKERS}
    most = max(SYMMETRIC_WORKERS)
    late = {place * (most // STRAGGLERS): Late(delay_s=1e-3 * (place + 1)) for place in range(STRAGGLERS)}
    straggled = _median_s(step(most, late)) / times[most]
    slow = {place: LINK.model_copy(update={"alpha_s": 1e-4 * (place % 7 + 1)}) for place in late}
    slowed = _median_s(lambda: simulate(ring_graph(profile, Schedule(), most, LINK, slow_links=slow))) / times[most]
    growth = np.log(times[most] / times[min(times)]) / np.log(most / min(times))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    graph = ring_graph(profile, Schedule(), most, LINK)
    plain = _median_s(lambda: simulate_events(graph)) / _median_s(lambda: simulate(graph))
    sent = 2 * (most - 1) * most * int((profile.parameter_bytes > 0).sum())
    for workers in SYMMETRIC_WORKERS[1:]:
        report(
            f"one step of {workers:,} workers: {1e3 * times[workers]:.2f} ms, {len(graph)} tasks simulated "
            f"(goal: at most {1e3 * MOST_S:.0f} ms: {_met(times[workers] <= MOST_S)})"
        )
    report(f"  unfolded, {most:,} workers would send {sent:.3g} chunks; plain Python on the same tasks: {plain:.1f} x")
    report(
        f"  process at its peak: {peak / 1e6:.0f} MB (goal: at most {MOST_BYTES / 1e6:.0f}: {_met(peak <= MOST_BYTES)})"
    )
    report(
        f"  cost grows with workers^{growth:.3f} from {min(times)} to {most:,} "
        f"(goal: at most {MOST_GROWTH}: {_met(growth <= MOST_GROWTH)})"
    )
    report(
        f"  {STRAGGLERS} late workers, each its own delay: {straggled:.2f} x "
        f"(goal: at most {MOST_STRAGGLED:g}: {_met(straggled <= MOST_STRAGGLED)})"
    )
    report(f"  {STRAGGLERS} slow links, each its own latency: {slowed:.1f} x, {1e3 * slowed * times[most]:.1f} ms")
    met = max(times.values()) <= MOST_S and peak <= MOST_BYTES and growth <= MOST_GROWTH and straggled <= MOST_STRAGGLED
    return {
        "step_s": times,
        "peak_bytes": peak,
        "growth": float(growth),
        "straggled": straggled,
        "slowed": slowed,
        "met": bool(met),
    }


def _unfolded(profile: LayerProfile, report: Callable[[str], None]) -> dict[str, Any]:
    built = time.perf_counter()
    graph = ring_graph(profile, Schedule(), UNFOLDED_WORKERS, LINK, folded=False)
    built = time.perf_counter() - built
    rate = len(graph) / _median_s(lambda: simulate(graph), 5)
    small = ring_graph(profile, Schedule(), PLAIN_WORKERS, LINK, folded=False)
    plain = len(small) / _median_s(lambda: simulate_events(small), 3)
    met = rate >= LEAST_EVENTS_PER_S
    report(
        f"unfolded, {UNFOLDED_WORKERS} workers, every chunk: {len(graph):,} events at {rate / 1e6:.2f} M/s "
        f"(goal: at least {LEAST_EVENTS_PER_S / 1e6:g}: {_met(met)}), built in {built:.2f} s"
    )
    report(f"  a plain loop over events ({PLAIN_WORKERS} workers): {plain / 1e6:.2f} M/s, {rate / plain:.1f} x slower")
    return {"events_per_s": rate, "plain_events_per_s": plain, "met": met}


def _what_if(profile: LayerProfile, report: Callable[[str], None]) -> dict[str, Any]:
    graph = ring_graph(profile, Schedule(), 1024, LINK)
    factors = np.random.default_rng(SEED).uniform(0.5, 2.0, (len(graph.resources), SCENARIOS))
    durations = graph.duration_s[:, None] * factors[graph.resource]
    rate = durations.size / _median_s(lambda: what_if(graph, durations), 7)
    some = durations[:, :PLAIN_SCENARIOS]
    plain = some.size / _median_s(lambda: plain_what_if(graph, some), 3)
    met = rate >= LEAST_EVALUATIONS_PER_S
    report(
        f"what-if, {SCENARIOS:,} scenarios of {len(graph)} tasks: {rate / 1e6:.0f} M task evaluations/s "
        f"(goal: at least {LEAST_EVALUATIONS_PER_S / 1e6:g}: {_met(met)})"
    )
    report(f"  a plain loop ({PLAIN_SCENARIOS} scenarios): {plain / 1e6:.2f} M/s, {rate / plain:.0f} x slower")
    return {"evaluations_per_s": rate, "plain_evaluations_per_s": plain, "met": met}


def plain_what_if(graph: TaskGraph, durations_s: np.ndarray) -> list[float]:
    """What `what_if.what_if` computes, in plain Python, one scenario after the other."""
    before, after, lag, iterations = edges_of(graph)
    waits: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
    for source, target, seconds, shift in zip(before, after, lag, iterations, strict=True):
        if shift == 0:
            waits[target].append((int(source), float(seconds)))
    order = topological_order(graph).tolist()
    steps = []
    for durations in durations_s.T.tolist():
        ends = [0.0] * len(durations)
        for task in order:
            start = 0.0
            for source, seconds in waits[task]:
                arrival = ends[source] + seconds
                if arrival > start:
                    start = arrival
            ends[task] = start + durations[task]
        steps.append(max(ends))
    return steps


def _median_s(work: Callable[[], Any], repeats: int = 15) -> float:
    """Median wall time; the first, which warms up, is not counted."""
    work()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _met(met: bool) -> str:
    return "met" if met else "not met"
