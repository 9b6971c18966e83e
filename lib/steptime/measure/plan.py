"""What a campaign measures: the cases, how often, how exactly, for how long."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
)
from pydantic import field_validator as checks

from steptime import frameworks, networks
from steptime.core.campaign import case_id_of
from steptime.core.errors import InputError
from steptime.core.files import read_json, validated
from steptime.core.network import BYTES_PER_VALUE


def _at_least_two(rounds: int) -> int:
    if rounds < 2:
        raise ValueError("at least 2; one process a case has no interval")
    return rounds


Batches = Annotated[
    tuple[Annotated[int, Field(strict=True, gt=0)], ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float | str) else value),
]
"""One batch or several, to see what a larger one brings."""
Names = Annotated[tuple[str, ...], Field(min_length=1)]
Rounds = Annotated[int, AfterValidator(_at_least_two)]
Input = Literal["sequential", "prefetch", "jpeg-0", "jpeg-1", "jpeg-2"]
"""How a step comes by its batch: synthetic, gathered in the step or one ahead by a thread; JPEG files, decoded in the
step or by 1 or 2 loader processes."""
DECIDE_CASES = ("frameworks", "networks", "size", "batch", "dtypes", "devices", "threads", "inputs")
"""The keys of a plan without which it is not known what to measure."""


@dataclass(frozen=True)
class Case:
    """What is timed: one network in one framework under one set of conditions. `threads` are of one worker."""

    framework: str
    network: str
    size: str
    batch: int
    dtype: str
    device: str
    threads: int
    input: str
    workers: int = 1

    @property
    def case_id(self) -> str:
        return case_id_of(vars(self))

    @property
    def loaders(self) -> int:
        """Processes that decode its input."""
        return int(self.input[-1]) if self.input.startswith("jpeg-") else 0

    @property
    def cores_needed(self) -> int:
        """Threads that may be runnable at once: those that read, and the loaders', count."""
        return self.threads + (self.input == "prefetch") + self.loaders

    def is_oversubscribed(self, cores: int) -> bool:
        """Does it have loaders that share cores? It is measured so; a case without is refused where cores lack."""
        return bool(self.loaders) and self.cores_needed > cores


class Plan(BaseModel):
    """The cases are all combinations of the lists, less the dtypes that a setting does not have. Per run: `warmups`,
    then `samples` steps, then, in the first `profile_rounds` rounds, repetitions of the phases and of the layers.
    Two rounds are always measured, whatever they take: one process a case has no interval. Further ones, to `rounds` at
    most, go on from `min_rounds` until every case's 95 % interval is at most `target_half_width` wide to each side
    (relative), and each is begun only if one as long as the mean of those before ends within `budget_s` seconds of the
    children's time. A child gets at most `memory_limit_gib` of private memory (RLIMIT_DATA), if given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    frameworks: Names = ("torch", "tensorflow")
    networks: Names = ("mlp", "lenet", "alexnet", "googlenet", "resnet50")
    size: Literal["quick", "full"] = "quick"
    batch: dict[str, Batches] = Field(
        default={"mlp": 32, "lenet": 32, "alexnet": 16, "googlenet": 16, "resnet50": 16}, validate_default=True
    )
    dtypes: Names = Field(default=("float32",), validate_default=True)
    devices: tuple[Literal["cpu", "cuda"], ...] = Field(default=("cpu",), min_length=1)
    threads: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)
    inputs: tuple[Input, ...] = Field(default=("sequential",), min_length=1)
    rounds: Rounds = 10
    min_rounds: Rounds = Field(default=5, validate_default=True)
    warmups: PositiveInt = 5
    samples: PositiveInt = 40
    layer_samples: NonNegativeInt = 5
    phase_samples: NonNegativeInt = 10
    profile_rounds: NonNegativeInt = 3
    target_half_width: PositiveFloat = 0.02
    budget_s: PositiveFloat = 240.0
    memory_limit_gib: Annotated[float, Field(gt=0, le=2**20)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1

    @checks("frameworks")
    @classmethod
    def _known_frameworks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _known(value, frameworks.SETTINGS)

    @checks("networks")
    @classmethod
    def _known_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _known(value, networks.NAMES)

    @checks("devices", "threads", "inputs")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a value comes twice; remove one")
        return value

    @checks("dtypes")
    @classmethod
    def _known_dtypes(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        _known(value, BYTES_PER_VALUE)
        for name in info.data.get("frameworks", ()):
            if not set(value) & set(has := frameworks.SETTINGS[name].dtypes):
                raise ValueError(f"{name!r} has none of them; it has {', '.join(has)}: add one or leave {name!r} out")
        return value

    @checks("batch")
    @classmethod
    def _a_batch_for_each_network(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        _known(tuple(value), networks.NAMES)
        for name, batches in value.items():
            if len(set(batches)) < len(batches):
                raise ValueError(f"a batch of {name!r} comes twice; remove one")
        for name in info.data.get("networks", ()):
            if name not in value:
                raise ValueError(f"no batch for {name!r}; add one")
        return value

    @checks("min_rounds")
    @classmethod
    def _at_most_all_rounds(cls, value: int, info: ValidationInfo) -> int:
        return min(value, info.data.get("rounds", value))

    def cases(self) -> tuple[Case, ...]:
        """Every case, in the order of the lists."""
        return tuple(
            Case(framework, network, self.size, batch, dtype, device, threads, reading)
            for framework, network, dtype, device, threads, reading in product(
                self.frameworks, self.networks, self.dtypes, self.devices, self.threads, self.inputs
            )
            for batch in self.batch[network]
            if dtype in frameworks.SETTINGS[framework].dtypes
        )

    def order(self, number: int) -> list[Case]:
        """The cases in the order in which round `number` visits them: drawn from the seed, so it can be drawn again.

        Randomised in blocks: the order of the networks is drawn, then that of each network's cases. Comparisons are
        between cases of one network, paired by round; their partners now share the minute, not only the round, so that
        less of the machine's drift is between them. Every order within a block is as likely as any other.
        """
        rng = np.random.default_rng([self.seed, number])
        blocks: dict[str, list[Case]] = {name: [] for name in rng.permutation(self.networks)}
        for case in self.cases():
            blocks[case.network].append(case)
        return [block[place] for block in blocks.values() for place in rng.permutation(len(block))]


def read_plan(data: Mapping[str, Any], source: str) -> Plan:
    """The plan in a mapping, e.g. a section of params.yaml named by `source`. Raises InputError naming the key."""
    return validated(Plan, data, source)


def read_plan_file(path: Path) -> Plan:
    """The plan that a campaign left in its plan.json. Raises InputError naming file and key.

    What decides the cases must be there; what a plan of an earlier version lacks besides has its default.
    """
    data = read_json(path)
    missing = [name for name in DECIDE_CASES if isinstance(data, Mapping) and name not in data]
    if missing:
        raise InputError(f"{path}: key {missing[0]!r} is missing; add it or take a campaign's plan.json")
    return validated(Plan, data, path)


def _known(names: tuple[str, ...], known: Any) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not known; known here: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ValueError("a name comes twice; remove one")
    return names
