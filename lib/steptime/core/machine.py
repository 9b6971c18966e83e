"""A machine: device, memory and links, with units in the key names and a source for each figure."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from steptime.core.errors import InputError
from steptime.core.files import read_yaml, validated

NonNegative = Annotated[float, Field(ge=0)]

BURST_S, LEAST_BURST_BYTES = 0.25e-3, 1 << 17
"""How the project's own links are shaped; the least is two of the kernel's largest packets."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Link(_Record):
    """Cost of a message of n bytes between two workers: alpha_s + n * beta_s_per_byte."""

    name: str
    alpha_s: NonNegative
    beta_s_per_byte: PositiveFloat
    source: str


def burst_bytes(rate_bits_per_s: float) -> float:
    """What may leave at once, after a pause, over a link that the project shapes: BURST_S of the rate, or the least."""
    return max(rate_bits_per_s / 8 * BURST_S, LEAST_BURST_BYTES)


class Machine(_Record):
    """`peak_flops_per_s` is of float32; `cores` are those that may be used, not those present."""

    name: str
    device: str
    cores: PositiveInt
    memory_bytes: PositiveInt
    peak_flops_per_s: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    links: tuple[Link, ...] = ()
    source: str


def read_machine(path: Path) -> Machine:
    """The machine in a YAML file. Raises InputError naming file, key, value and mend."""
    return validated(Machine, read_yaml(path), path)


def read_link(folder: Path, name: str) -> Link:
    """The link in `folder`/NAME.yaml (data/machines/links). Raises InputError naming the known ones for another."""
    known = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    if name not in known:
        raise InputError(f"link {name!r}: is not in {folder}; known are {', '.join(known) or 'none'}")
    path = Path(folder) / f"{name}.yaml"
    link = validated(Link, read_yaml(path), path)
    if link.name != name:
        raise InputError(f"{path}: name = {link.name!r}: must equal the file's name; rename one of them")
    return link
