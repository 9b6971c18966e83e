"""What collectives cost here: measured with gloo over sizes, numbers of workers and rates of their links.

Three tables: `collectives.csv`, a row a point with the columns that `steptime collectives fit` reads; `samples.csv`, a
row a repetition; `links.csv`, what the links were measured to be. Seconds and bytes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic import field_validator as checks

from steptime.cluster.launcher import Place
from steptime.cluster.links import Links, links
from steptime.cluster.torch_gloo import run_gloo
from steptime.core.errors import InputError
from steptime.core.files import json_text, write_texts
from steptime.measure.lock import measuring_lock
from steptime.measure.provenance import code_facts, machine_facts

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
LARGEST_BYTES = 1 << 30


class CollectivesPlan(BaseModel):
    """All operations at all sizes, by all numbers of workers over all links; `rates` in bits a second, None for the
    loopback interface. Each round starts fresh ranks for each number of workers and link, and draws the order anew.
    `bytes` are of a rank's whole buffer and are rounded up to whole values for each worker.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    operations: tuple[str, ...] = ("all_reduce",)
    bytes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = tuple(4**power for power in range(5, 13))
    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=64)], ...], Field(min_length=1)] = (2, 4)
    rates: tuple[PositiveFloat | None, ...] = (None,)
    rounds: PositiveInt = 3
    warmups: PositiveInt = 2
    repeats: Annotated[int, Field(ge=3)] = 20
    budget_s: PositiveFloat = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1

    @checks("operations")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in OPERATIONS:
                raise ValueError(f"{name!r} is not known; known are {', '.join(OPERATIONS)}")
        return value

    @checks("bytes")
    @classmethod
    def _not_too_large(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if max(value) > LARGEST_BYTES:
            raise ValueError(f"at most {LARGEST_BYTES}")
        return value


@dataclass(frozen=True)
class Collectives:
    """The three tables."""

    points: pd.DataFrame
    samples: pd.DataFrame
    links: pd.DataFrame


def run_collectives(plan: CollectivesPlan, report: Callable[[str], None] = print) -> Collectives:
    """Measure the plan. Raises InputError while something else is measured on this machine, or without root for rates,
    RunFailed when a rank dies."""
    samples: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    starts = [(number, rate) for number in range(plan.rounds) for rate in plan.rates]
    with measuring_lock():
        for done, (number, rate) in enumerate(starts, 1):
            with nullcontext() if rate is None else links(max(plan.workers), rate) as made:
                if made is not None:
                    found.append({"round": number, "rate_bits_per_s": rate, **link_facts(made)})
                for workers in plan.workers:
                    rows = _measured(plan, workers, made, number)
                    samples += [{"round": number, "rate_bits_per_s": rate, "workers": workers, **row} for row in rows]
            report(f"round and link {done}/{len(starts)}: {rate_name(rate)}: {len(samples)} repetitions so far")
    table = pd.DataFrame(samples)
    return Collectives(_points(table), table, pd.DataFrame(found))


def write_collectives(collectives: Collectives, plan: CollectivesPlan, folder: Path) -> None:
    """Write the tables, and plan.json with the plan, the code and the machine."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder, a new one or one that is there")
    form: dict[str, Any] = {"index": False, "float_format": "%.9g", "lineterminator": "\n"}
    facts = {"plan": plan.model_dump(mode="json"), "machine": machine_facts(), "code": code_facts()}
    tables = {"samples": collectives.samples, "links": collectives.links, "collectives": collectives.points}
    texts = {folder / f"{name}.csv": table.to_csv(**form) for name, table in tables.items()}
    write_texts({folder / "plan.json": json_text(facts), **texts})


def rate_name(rate_bits_per_s: float | None) -> str:
    """As the rate was written, or loopback."""
    if rate_bits_per_s is None:
        return "loopback"
    unit, name = next((u, n) for u, n in ((1e9, "g"), (1e6, "m"), (1e3, "k")) if rate_bits_per_s >= u)
    return f"{rate_bits_per_s / unit:g}{name}bit"


def link_facts(made: Links) -> dict[str, float]:
    """What a link was measured to be, and what it is without being held back."""
    return {
        "alpha_s": made.link.alpha_s,
        "beta_s_per_byte": made.link.beta_s_per_byte,
        "unshaped_alpha_s": made.unshaped.alpha_s,
        "unshaped_beta_s_per_byte": made.unshaped.beta_s_per_byte,
    }


def _measured(plan: CollectivesPlan, workers: int, made: Links | None, number: int) -> list[dict[str, Any]]:
    """The repetitions of one start of `workers` ranks."""
    places = [Place()] * workers if made is None else list(made.places[:workers])
    step = 4 * workers
    cases = [(name, -(-size // step) * step) for name in plan.operations for size in plan.bytes]
    order = np.random.default_rng([plan.seed, number, workers]).permutation(len(cases))
    shuffled = [cases[place] for place in order]
    told = {"cases": shuffled, "warmups": plan.warmups, "repeats": plan.repeats, "budget_s": plan.budget_s}
    longest_s = 120 + len(cases) * (30 + 3 * plan.budget_s)
    answers = run_gloo("collectives_gloo.py", told, places, timeout_s=longest_s)
    rows = []
    for case, (name, size) in enumerate(shuffled):
        moments = np.array([answer["moments"][case] for answer in answers])
        # From when the last rank came to when the last one went: waiting for a late rank is not the collective's.
        times = moments[:, :, 1].max(0) - moments[:, :, 0].max(0)
        rows += [
            {"operation": name, "n_bytes": size, "repeat": repeat, "time_s": time_s}
            for repeat, time_s in enumerate(times)
        ]
    nodes = 1 if made is None else workers
    return [{"library": f"gloo, torch {answers[0]['version']}", "nodes": nodes, **row} for row in rows]


def _points(samples: pd.DataFrame) -> pd.DataFrame:
    """Median and standard deviation over the repetitions of all rounds; the group is operation, library and link."""
    link = samples["rate_bits_per_s"].map(lambda rate: rate_name(None if pd.isna(rate) else rate))
    grouped = samples.assign(group=samples["operation"] + " gloo " + link).groupby(
        ["group", "workers", "nodes", "n_bytes"]
    )
    return grouped["time_s"].agg(time_s="median", time_std_s="std").reset_index()
