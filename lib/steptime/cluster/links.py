"""Links between workers on one machine: network namespaces on a switch, each interface at a given rate.

A worker's namespace has one interface, `eth0`, whose other end is a port of a bridge in a namespace of its own, so that
nothing is added to the machine's own network. What goes out is shaped on `eth0`, what comes in on the port, both by
`tc tbf`: a full-duplex link of that rate. Only names that begin with "steptime-" and an owner are ever removed.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime.cluster.launcher import PROGRAMS, Place, Rank, listening, run_ranks
from steptime.core.errors import InputError
from steptime.core.machine import LEAST_BURST_BYTES, burst_bytes

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
HELD = 0
"""The owner of links that stay up until `down`: no process."""
MOST_WORKERS = 200
QUEUE_BYTES = 1 << 26
"""What a shaped interface may hold back: more than all senders' windows, so that nothing is dropped."""
CPU_BOUND_SHARE = 1 / 3
"""Of what the machine can move at all: above, its cores decide and not the link."""
NEEDED_CAPABILITIES = 1 << 12 | 1 << 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN, which root has but in some containers."""
_NAME = re.compile(r"steptime-(?P<owner>\d+)-(?P<born>\d+)-(?P<part>switch|w\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")


@dataclass(frozen=True)
class Measured:
    """What one message between two workers costs, measured: alpha_s + n beta_s_per_byte, by messages there and back."""

    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class Links:
    """Links that are up. `rate_bits_per_s` is None where nothing is shaped; `unshaped` is what the machine's own
    processors make of a link that nothing holds back."""

    places: tuple[Place, ...]
    rate_bits_per_s: float | None
    link: Measured
    unshaped: Measured

    def is_cpu_bound(self, workers: int) -> bool:
        """Would `workers` that all send at the rate take more than CPU_BOUND_SHARE of the machine's own throughput?"""
        if self.rate_bits_per_s is None:
            return True
        return workers * self.rate_bits_per_s / 8 > CPU_BOUND_SHARE / self.unshaped.beta_s_per_byte


@dataclass(frozen=True)
class Found:
    """Links that somebody's processes made: by owner, who is alive, HELD or dead (what it left is swept)."""

    owner: int
    is_alive: bool
    namespaces: tuple[str, ...]


def rate_of(text: str) -> float:
    """Bits a second of e.g. "1gbit", "250mbit". Raises InputError."""
    match = _RATE.fullmatch(text.strip().lower())
    value = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not 1e5 <= value <= 1e12:
        raise InputError(f"rate = {text!r}: must be from 100kbit to 1000gbit; write it as 250mbit or 10gbit")
    return value


@contextmanager
def links(workers: int, rate_bits_per_s: float | None) -> Iterator[Links]:
    """Links for `workers` while the block runs. See `up`; what a killed process leaves is swept by the next."""
    made = up(workers, rate_bits_per_s, os.getpid())
    try:
        yield made
    finally:
        _remove(_names(os.getpid()))


def up(workers: int, rate_bits_per_s: float | None, owner: int = HELD) -> Links:
    """Make links for `workers`, measure them, and leave them up until `down` or, with an owner, its end.

    Raises InputError without root or without ip and tc, and when such links are up already.
    """
    check_able()
    if not 2 <= workers <= MOST_WORKERS:
        raise InputError(f"workers = {workers}: must be from 2 to {MOST_WORKERS}; a link has two ends")
    sweep()
    if _names(owner):
        raise InputError("links are up already; take them down first: steptime links down")
    try:
        places = _make(workers, owner)
        unshaped = measured(places[:2], None)
        if rate_bits_per_s is None:
            return Links(places, None, unshaped, unshaped)
        _shape(places, owner, rate_bits_per_s)
        return Links(places, rate_bits_per_s, measured(places[:2], rate_bits_per_s), unshaped)
    except BaseException:
        _remove(_names(owner))
        raise


def down() -> tuple[str, ...]:
    """Remove the links that are held, and what dead owners left; those of living owners stay. The names removed."""
    check_able()
    return sweep() + _remove(_names(HELD))


def sweep() -> tuple[str, ...]:
    """Remove what owners left that are no more; the names removed."""
    return _remove([name for found in list_links() if not found.is_alive for name in found.namespaces])


def list_links() -> list[Found]:
    """All links of this project on the machine, of any owner."""
    owners: dict[tuple[int, int], list[str]] = {}
    for path in sorted(NAMESPACES.glob("steptime-*")):
        if match := _NAME.fullmatch(path.name):
            owners.setdefault((int(match["owner"]), int(match["born"])), []).append(path.name)
    return [
        Found(owner, owner == HELD or _born(owner) == born, tuple(names))
        for (owner, born), names in sorted(owners.items())
    ]


def measured(places: Sequence[Place], rate_bits_per_s: float | None) -> Measured:
    """Messages there and back between two places, tiny ones for alpha and two large sizes for beta.

    The slope between the large ones leaves out what may leave at once (the burst). Medians.
    """
    bytes_a_s = 2e9 if rate_bits_per_s is None else rate_bits_per_s / 8
    large = int(min(max(bytes_a_s * 10e-3, 4 * LEAST_BURST_BYTES), 1 << 23))
    sizes = (1, large, 2 * large)
    with listening(places[0]) as server:
        job = {
            **{"address": places[0].address, "port": server.getsockname()[1], "handle": server.fileno()},
            **{"bytes": sizes, "repeats": 40, "warmups": 3, "budget_s": 0.5},
        }
        program = (sys.executable, "-ISB", str(PROGRAMS / "ping_pong.py"))
        ranks = [
            Rank(program, place, json.dumps({**job, "rank": number}), handles=(server.fileno(),) * (number == 0))
            for number, place in enumerate(places[:2])
        ]
        times = [statistics.median(each) for each in json.loads(run_ranks(ranks, 60)[1])]
    return Measured(times[0], max(times[2] - times[1], 1e-12) / (sizes[2] - sizes[1]))


def check_able() -> None:
    """Raise InputError where this process cannot make links."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InputError(f"links: {' and '.join(missing)} not found; install the system package iproute2")
    status = Path("/proc/self/status").read_text()
    has = int(re.search(r"^CapEff:\s*(\w+)", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    if has & NEEDED_CAPABILITIES != NEEDED_CAPABILITIES:
        raise InputError("links: making them needs root; run as root, or without --rate over the loopback interface")


# ---------------------------------------------------------------------------------------------- what the kernel does


def _make(workers: int, owner: int) -> tuple[Place, ...]:
    switch, *names = [_name(owner, part) for part in ("switch", *(f"w{number}" for number in range(workers)))]
    for name in (switch, *names):
        _run("ip", "netns", "add", name)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    places = []
    for number, name in enumerate(names):
        port, address = f"port{number}", f"10.0.0.{number + 1}"
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        places.append(Place(name, INTERFACE, address))
    return tuple(places)


def _shape(places: Sequence[Place], owner: int, rate_bits_per_s: float) -> None:
    burst = str(int(burst_bytes(rate_bits_per_s)))
    bucket = ("root", "tbf", "rate", f"{rate_bits_per_s:.0f}bit", "burst", burst, "limit", str(QUEUE_BYTES))
    for number, place in enumerate(places):
        assert place.namespace
        _run("tc", "-n", place.namespace, "qdisc", "add", "dev", INTERFACE, *bucket)
        _run("tc", "-n", _name(owner, "switch"), "qdisc", "add", "dev", f"port{number}", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"links: {' '.join(command)}: {said}; see whether this machine's kernel can do that")


def _remove(names: Sequence[str]) -> tuple[str, ...]:
    """Remove namespaces of ours; what is in one goes with it once its last process has ended."""
    for name in names:
        assert _NAME.fullmatch(name)
        # Another process may sweep at the same time.
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return tuple(names)


def _name(owner: int, part: str) -> str:
    return f"steptime-{owner}-{0 if owner == HELD else _born(owner)}-{part}"


def _names(owner: int) -> list[str]:
    born = 0 if owner == HELD else _born(owner)
    return [path.name for path in sorted(NAMESPACES.glob(f"steptime-{owner}-{born}-*")) if _NAME.fullmatch(path.name)]


def _born(pid: int) -> Any:
    """When the process started, in the kernel's ticks: a process id may be given again. None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
