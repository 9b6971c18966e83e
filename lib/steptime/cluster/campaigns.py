"""A campaign of many workers: every cell once a round, by fresh ranks, in random order within each link.

The tables runs.csv and samples.csv are those of any campaign, a run being one start of all ranks and a sample one step
of all of them; core/workers.py has what comes beside them.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic import field_validator as checks

from steptime import networks
from steptime.cluster import engines, torch_gloo
from steptime.cluster.collectives import rate_name
from steptime.cluster.launcher import Place, RunFailed
from steptime.cluster.links import Links, check_able, links
from steptime.cluster.schedules import Learnable, Synchronisation, learnable_in, learnable_of, synchronisation
from steptime.core.campaign import SCHEMA_VERSION, Campaign, as_table, read_campaign, write_campaign
from steptime.core.errors import InputError
from steptime.core.files import json_text, read_json, write_text
from steptime.core.step import LayerProfile
from steptime.core.workers import COMPUTED, EMULATED, TIMELINES, WORKERS, csv_text, profile_table
from steptime.measure.fingerprint import fingerprints, short_hash
from steptime.measure.lock import measuring_lock
from steptime.measure.provenance import code_facts, cores_allowed, machine_facts, without_paths
from steptime.measure.run import COVARIATES, Run, campaign_of, disturbed

FAILURES_ALLOWED = 2
"""A cell that failed so often is not started again in this campaign."""
HERE = Path(__file__).parent


class WorkersPlan(BaseModel):
    """All schedules on all numbers of workers over all links; `rates` in bits a second, None for the loopback
    interface. A schedule is torch_gloo's, or of another engine as ENGINE/SCHEDULE. `emulate` names the layer profile
    that is replayed, or is None where the network really computes. `batch` is of one worker. Each run is `warmups`,
    then `steps` timed steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    network: str
    size: Literal["quick", "full"] = "quick"
    batch: PositiveInt = 16
    workers: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1)] = (1, 2)
    schedules: Annotated[tuple[str, ...], Field(min_length=1)] = ("end_of_backward", "wait_free", "buckets")
    rates: Annotated[tuple[PositiveFloat | None, ...], Field(min_length=1)] = (None,)
    emulate: str | None = None
    threads: PositiveInt = 1
    rounds: PositiveInt = 3
    warmups: PositiveInt = 3
    steps: PositiveInt = 20
    timeout_s: PositiveFloat = 600.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1

    @checks("workers", "schedules", "rates")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a value comes twice; remove one")
        return value


@dataclass(frozen=True)
class Cell:
    """One schedule of an engine on one number of workers over one link."""

    engine: str
    sync: Synchronisation
    rate_bits_per_s: float | None
    case_id: str

    def run_id(self, number: int) -> str:
        return f"{self.case_id}-r{number:02d}"


@dataclass(frozen=True)
class _Kept:
    """A run with its rows of workers.csv and timelines.csv."""

    run: Run
    workers: tuple[dict[str, Any], ...] = ()
    timeline: tuple[dict[str, Any], ...] = ()


def measure_workers(
    plan: WorkersPlan,
    out: Path,
    profile: LayerProfile | None = None,
    *,
    fresh: bool = False,
    report: Callable[[str], None] = print,
) -> Campaign:
    """Measure the plan's cells and write the campaign into `out`, assembled at the end.

    Finished runs are kept one by one in OUT.partial and not made again after an interruption, as long as plan, code and
    machine are the same. A cell whose ranks die is a row with its reason, and the others go on. Raises InputError for
    what cannot work, before anything is started: an unknown network or schedule, an engine that is not installed, links
    without root, another measuring.
    """
    if (plan.emulate is None) != (profile is None):
        raise InputError("workers: emulate: names a profile if and only if one is given")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder, a new one or one that is there")
    if any(rate is not None for rate in plan.rates):
        check_able()
    for engine in {engines.named(schedule)[0] for schedule in plan.schedules}:
        engines.check_installed(engine)
    with measuring_lock():
        return _Campaign(plan, profile, report).measured(out, fresh=fresh)


def cells_of(plan: WorkersPlan, layers: Sequence[Learnable]) -> list[Cell]:
    """The plan's cells. Raises InputError for a schedule that is unknown or does not fit the network or the workers.

    A single worker has nothing to send: it is one cell of each engine, whatever the schedules and the links.
    """
    cells = []
    alone = tuple(dict.fromkeys(engines.alone(schedule) for schedule in plan.schedules))
    compute = "computed" if plan.emulate is None else "emulated"
    for workers in plan.workers:
        for schedule in plan.schedules if workers > 1 else alone:
            engine, own = engines.named(schedule)
            sync = engines.synchronisation(engine, own, layers, workers, plan.batch)
            for rate in plan.rates if workers > 1 else (None,):
                parts = (engine, plan.network, plan.size, f"b{plan.batch}", f"w{workers}", sync.label)
                cells.append(Cell(engine, sync, rate, "-".join((*parts, rate_name(rate), compute))))
    return cells


class _Campaign:
    """The state of one call: the runs so far, by run_id."""

    def __init__(self, plan: WorkersPlan, profile: LayerProfile | None, report: Callable[[str], None]) -> None:
        self.plan, self.profile, self.report = plan, profile, report
        self.network = None
        if profile is None or plan.network in networks.NAMES:
            self.network = networks.build(plan.network, size=plan.size)
        self.layers = learnable_of(self.network) if profile is None and self.network else []
        if profile is not None:
            self.layers = learnable_in(profile, self.network)
        self.cells = cells_of(plan, self.layers)
        found = fingerprints()
        self.fingerprints = {
            cell.engine: short_hash([found["machine"], found[engines.setting_of(cell.engine)]]) for cell in self.cells
        }
        self.runs: dict[str, _Kept] = {}

    def measured(self, out: Path, *, fresh: bool) -> Campaign:
        store = _Store(out.with_name(f"{out.name}.partial"), self._key())
        if fresh:
            store.clear()
        self.runs = store.kept()
        wanted = {cell.run_id(number) for number in range(self.plan.rounds) for cell in self.cells}
        self.runs = {run_id: kept for run_id, kept in self.runs.items() if run_id in wanted}
        self.report(f"{len(self.cells)} cells, {self.plan.rounds} rounds; kept {len(self.runs)} finished runs")
        for number in range(self.plan.rounds):
            self._round(number, store)
        self._write(out)
        store.clear()
        return read_campaign(out)

    def _round(self, number: int, store: "_Store") -> None:
        """Each link in turn, in an order drawn anew, and over it each cell that is missing."""
        generator = np.random.default_rng([self.plan.seed, number])
        order = [self.plan.rates[place] for place in generator.permutation(len(self.plan.rates))]
        alone = [] if None in order else [None]
        done = 0
        for rate in [*order, *alone]:
            cells = [cell for cell in self.cells if cell.rate_bits_per_s == rate]
            missing = [cells[place] for place in generator.permutation(len(cells))]
            missing = [cell for cell in missing if cell.run_id(number) not in self.runs and not self._is_given_up(cell)]
            nodes = max((max(cell.sync.nodes) + 1 for cell in missing), default=0)
            if not missing:
                continue
            with nullcontext() if rate is None else links(max(2, nodes), rate) as made:
                for cell in missing:
                    kept = self._run(cell, number, made, position=done)
                    done += 1
                    self.runs[kept.run.row["run_id"]] = kept
                    if kept.run.is_finished:
                        store.save(kept)
                    self.report(f"round {number + 1}/{self.plan.rounds} run {done}/{len(self.cells)} {_line(kept)}")

    def _is_given_up(self, cell: Cell) -> bool:
        rows = [kept.run.row for kept in self.runs.values()]
        return sum(row["case_id"] == cell.case_id and row["status"] == "failed" for row in rows) >= FAILURES_ALLOWED

    def _run(self, cell: Cell, number: int, made: Links | None, position: int) -> _Kept:
        row = self._base_row(cell, number, position)
        places = [Place()] * (max(cell.sync.nodes) + 1) if made is None else made.places
        plan = self.plan
        network = self.network if self.profile is None else None
        job = torch_gloo.Job(network, self.profile, plan.batch, plan.warmups, plan.steps, plan.seed, plan.threads)
        started = time.perf_counter()
        try:
            answers = engines.train(cell.engine, job, cell.sync, self.layers, places, timeout_s=plan.timeout_s)
        except RunFailed as error:
            ended = {"status": "failed", "reason": without_paths(str(error))}
            return _Kept(Run(row | ended | {"duration_s": time.perf_counter() - started}))
        row |= _facts(answers.workers) | {"duration_s": time.perf_counter() - started}
        steps = step_rows(answers.workers, plan.warmups, own_delays=len(cell.sync.nodes) > cores_allowed())
        samples = tuple({"run_id": row["run_id"], **step} for step in steps)
        workers = {"run_id": row["run_id"], **self._workers_row(cell, made, answers)}
        timeline = self._timeline(cell, row["run_id"], answers.workers) if number == 0 else ()
        return _Kept(Run(row, samples), (workers,), tuple(timeline))

    def _base_row(self, cell: Cell, number: int, position: int) -> dict[str, Any]:
        plan = self.plan
        return {
            **{"run_id": cell.run_id(number), "case_id": cell.case_id, "schema_version": SCHEMA_VERSION},
            **{"framework": engines.setting_of(cell.engine), "network": plan.network},
            **{"size": plan.size, "batch": plan.batch},
            **{"dtype": "float32", "device": "cpu", "threads": plan.threads, "workers": cell.sync.workers},
            **{"input": "sequential", "round": number, "position": position, "seed": plan.seed},
            **{
                "warmups": plan.warmups,
                "fingerprint": self.fingerprints[cell.engine],
                "command": "steptime workers run",
            },
            **{"timer": "monotonic", "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
            **{"load_1min": os.getloadavg()[0], **machine_facts(), **code_facts()},
        }

    def _workers_row(self, cell: Cell, made: Links | None, answers: torch_gloo.Answers) -> dict[str, Any]:
        workers_nodes = set(cell.sync.nodes[: cell.sync.workers])
        link: dict[str, float | None] = {"alpha_s": None, "beta_s_per_byte": None, "unshaped_beta_s_per_byte": None}
        if made is not None:
            link = {**asdict(made.link), "unshaped_beta_s_per_byte": made.unshaped.beta_s_per_byte}
        return {
            "engine": cell.engine,
            "schedule": cell.sync.label,
            "compute": COMPUTED if self.profile is None else EMULATED,
            "profile": None if self.profile is None else without_paths(self.profile.source),
            "ranks": len(cell.sync.nodes),
            "nodes": 1 if made is None else len(set(cell.sync.nodes)),
            "ends": " ".join(map(str, cell.sync.ends)) or None,
            "rate_bits_per_s": cell.rate_bits_per_s,
            **link,
            "is_cpu_bound": cell.sync.workers > 1 and (made is None or made.is_cpu_bound(cell.sync.workers)),
            "sent_bytes": None if answers.sent_bytes is None else max(answers.sent_bytes),
            "expected_bytes": max(cell.sync.sent_bytes[node] for node in workers_nodes),
            **_phases(answers.workers, self.plan.warmups),
        }

    def _timeline(self, cell: Cell, run_id: str, workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The last step of each worker, seconds from when the first of them began it."""
        zero_s = min(answer["steps"][-1]["start_s"] for answer in workers)
        rows = []
        for worker, answer in enumerate(workers):
            step = answer["steps"][-1]
            tasks: list[tuple[str, str, str | None, float | None, float | None]] = [
                ("forward", "device", None, step["start_s"], step["forward_s"]),
                ("backward", "device", None, step["forward_s"], step["backward_s"]),
                ("update", "device", None, step["averaged_s"], step["updated_s"]),
            ]
            for group, start_s, end_s in answer["exchanges"]:
                numbers = cell.sync.told["groups"][group] if cell.sync.told["groups"] else []
                names = "+".join(self.layers[number].name for number in numbers)
                tasks.append(("exchange", "link", names or None, start_s, end_s))
            rows += [
                {
                    **{"run_id": run_id, "worker": worker, "task": task, "resource": resource, "layer": layer},
                    **{"start_s": max(0.0, start_s - zero_s), "end_s": max(0.0, end_s - zero_s)},
                }
                for task, resource, layer, start_s, end_s in tasks
                if start_s is not None and end_s is not None
            ]
        return rows

    def _key(self) -> str:
        """The same for runs that may stand side by side: same plan but for what decides how many, code, machine."""
        deciding = self.plan.model_dump(mode="json", exclude={"workers", "schedules", "rates", "rounds", "timeout_s"})
        files = sorted(HERE.rglob("*.py"))
        own = [file.read_text() for file in files]
        profile = None if self.profile is None else profile_table(self.profile).to_csv()
        return short_hash([deciding, own, code_facts()["code_hash"], self.fingerprints, profile])

    def _write(self, out: Path) -> None:
        kept = [self.runs[run_id] for run_id in sorted(self.runs)]
        workers = as_table([row for each in kept for row in each.workers], WORKERS)
        timelines = as_table([row for each in kept for row in each.timeline], TIMELINES)
        # A merged plan's file is named by what is in it, which `ends` spells out: no path goes into the record.
        most = max(self.plan.workers)
        schedules = [
            synchronisation(name, self.layers, most, self.plan.batch).label if name.startswith("merged=") else name
            for name in self.plan.schedules
        ]
        beside = {
            "plan.json": json_text(self.plan.model_dump(mode="json") | {"schedules": schedules}),
            "workers.csv": csv_text(workers),
            "timelines.csv": csv_text(timelines),
        }
        if self.profile is not None:
            beside["profile.csv"] = csv_text(profile_table(self.profile))
        write_campaign(campaign_of([each.run for each in kept], out.name), out, beside)
        count = Counter(each.run.row["status"] for each in kept)
        self.report(f"{count['finished']} runs finished, {count['failed']} failed")


class _Store:
    """Finished runs, a JSON file each, RUN_ID.KEY.json; those of another key are left out and removed at the end."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def kept(self) -> dict[str, _Kept]:
        found = {}
        for path in sorted(self._folder.glob(f"*.{self._key}.json")):
            data = read_json(path)
            run = Run(data["row"], tuple(data["samples"]))
            found[run.row["run_id"]] = _Kept(run, tuple(data["workers"]), tuple(data["timeline"]))
        return found

    def save(self, kept: _Kept) -> None:
        data = {
            **{"row": kept.run.row, "samples": kept.run.samples},
            **{"workers": kept.workers, "timeline": kept.timeline},
        }
        write_text(self._folder / f"{kept.run.row['run_id']}.{self._key}.json", json.dumps(data))

    def clear(self) -> None:
        for path in self._folder.glob("*.json"):
            path.unlink()
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()


def step_rows(workers: Sequence[Mapping[str, Any]], warmups: int, *, own_delays: bool) -> list[dict[str, Any]]:
    """The rows of samples.csv: each step from when the last worker began it to when the last one ended it.

    Between steps each worker reads its counters, which is no part of either. CPU time, delays and switches are summed
    over the workers; steal is the machine's.
    """
    ends = np.array([[step["end_s"] for step in answer["steps"]] for answer in workers]).max(0)
    starts = np.array([[step["start_s"] for step in answer["steps"]] for answer in workers]).max(0)
    rows = []
    for number, (start_s, end_s) in enumerate(zip(starts, ends, strict=True)):
        each = [answer["steps"][number] for answer in workers]
        seen = {name: sum(step[name] for step in each) for name in COVARIATES}
        seen["steal_s"], seen["load_1min"] = max(step["steal_s"] for step in each), each[0]["load_1min"]
        timed = {"phase": "step", "repeat": number, "is_warmup": number < warmups, "time_s": float(end_s - start_s)}
        rows.append({**timed, **seen, "is_disturbed": False})
    flags = disturbed(rows[warmups:], own_delays=own_delays)
    for row, flag in zip(rows[warmups:], flags, strict=True):
        row["is_disturbed"] = flag
    return rows


def _facts(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of runs.csv that the workers answer for."""
    losses = [answer["losses"] for answer in workers]
    versions = workers[0]["versions"]
    return {
        "status": "finished",
        "parameters": workers[0]["parameters"],
        "build_s": max(answer["build_s"] for answer in workers),
        "peak_memory_bytes": sum(answer["peak_memory_bytes"] for answer in workers),
        "framework_version": versions["framework"],
        "python_version": versions["python"],
        "loss_first": float(np.mean([each[0] for each in losses])) if losses[0] else None,
        "loss_last": float(np.mean([each[-1] for each in losses])) if losses[0] else None,
    }


def _phases(workers: Sequence[Mapping[str, Any]], warmups: int) -> dict[str, float | None]:
    """Where a timed step's time went: medians over steps of means over workers; None where an engine shows none."""
    steps = pd.DataFrame(
        [{**step, "number": number} for answer in workers for number, step in enumerate(answer["steps"])],
        dtype=float,
    )
    steps = steps[steps["number"] >= warmups]
    parts = {
        "forward_s": steps["forward_s"] - steps["start_s"],
        "backward_s": steps["backward_s"] - steps["forward_s"],
        "exposed_s": (steps["averaged_s"] - steps["backward_s"]) + (steps["end_s"] - steps["updated_s"]),
        "update_s": steps["updated_s"] - steps["averaged_s"],
    }
    medians = {name: float(part.groupby(steps["number"]).mean().median()) for name, part in parts.items()}
    return {name: None if np.isnan(median) else max(0.0, median) for name, median in medians.items()}


def _line(kept: _Kept) -> str:
    row = kept.run.row
    if not kept.run.is_finished:
        return f"{row['case_id']}: {row['status']}: {row['reason']}"
    times = [sample["time_s"] for sample in kept.run.step_samples()]
    return f"{row['case_id']}: {1e3 * float(np.median(times)):.4g} ms"
