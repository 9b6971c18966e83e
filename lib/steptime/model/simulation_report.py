"""A simulated step in words: `steptime simulate`."""

from steptime.core.errors import InputError
from steptime.core.machine import Link
from steptime.model.critical_path import critical_path, exposed_communication_s, path_by_kind_s
from steptime.model.simulator import Simulated
from steptime.model.what_if import bottlenecks, steady_s


def slower_link(link: Link, factor: float) -> Link:
    """`link`, each message `factor` times as long. Raises InputError for a factor below 1."""
    if not 1 <= factor < float("inf"):
        raise InputError(f"slow link: factor = {factor}: must be 1 or more")
    slower = {"alpha_s": link.alpha_s * factor, "beta_s_per_byte": link.beta_s_per_byte * factor}
    return link.model_copy(update=slower)


def report_lines(found: Simulated) -> list[str]:
    """The step alone and in steady state, exposed communication, the critical path by kind, what each resource costs.

    Milliseconds. `found` is one iteration from an idle beginning.
    """
    steady = steady_s(found.graph)
    path = path_by_kind_s(critical_path(found))
    parts = ", ".join(f"{kind} {1e3 * seconds:.4g}" for kind, seconds in path.items() if seconds > 0)
    lines = [
        f"step: {1e3 * steady:.4g} ms in steady state, {1e3 * found.step_s:.4g} ms alone; {found.tasks} tasks",
        f"communication that is not hidden: {1e3 * float(exposed_communication_s(found).max()):.4g} ms",
        f"critical path of a step alone, ms: {parts}",
    ]
    for row in bottlenecks(found.graph).itertuples():
        lines.append(f"if {row.resource} took no time: {1e3 * row.free_step_s:.4g} ms, {row.gain:.1%} less")
    return lines
