"""Shaped links: made, measured, removed; what dead owners left is swept, and nothing else is touched."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steptime.cluster import links as shaped
from steptime.cluster.launcher import Rank, RunFailed, listening, run_ranks
from steptime.cluster.links import Links, Measured, list_links, rate_of
from steptime.core.errors import InputError


@pytest.fixture
def able() -> Iterator[None]:
    """Skips where links cannot be made, and checks that a test leaves none of its own."""
    try:
        shaped.check_able()
    except InputError as error:
        pytest.skip(str(error))
    yield
    assert [found for found in list_links() if found.owner == os.getpid()] == []


def namespaces() -> set[str]:
    return {path.name for path in shaped.NAMESPACES.glob("*")} if shaped.NAMESPACES.exists() else set()


def host_links() -> int:
    return Path("/proc/net/dev").read_text().count(":")


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1e9), ("250mbit", 2.5e8), ("2.5Gbit", 2.5e9), ("500kbit", 5e5)])
def test_a_rate_has_its_unit(text: str, rate: float) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize("text", ["", "1", "fast", "0gbit", "1gb", "-1gbit", "1e9bit", "9999gbit", "1gbit; rm"])
def test_a_rate_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^rate = .+: must be from 100kbit"):
        rate_of(text)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped, "NEEDED_CAPABILITIES", 1 << 63)
    with pytest.raises(InputError, match="making them needs root; run as root, or without --rate"):
        shaped.up(2, 1e9)
    with pytest.raises(InputError, match="making them needs root"):
        shaped.down()


def test_without_the_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="ip and tc not found; install the system package iproute2"):
        shaped.up(2, 1e9)


def test_links_are_there_while_the_block_runs_and_carry_no_more_than_their_rate(able: None) -> None:
    before, interfaces = namespaces(), host_links()
    with shaped.links(3, 50e6) as made:
        assert len(namespaces() - before) == 4
        assert host_links() == interfaces, "nothing is added to the machine's own network"
        assert [place.address for place in made.places] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert made.link.beta_s_per_byte > 0.97 * 8 / 50e6
        assert made.unshaped.beta_s_per_byte < made.link.beta_s_per_byte
        assert made.link.alpha_s > 0
        assert not made.is_cpu_bound(2)
    assert namespaces() == before


def test_what_comes_in_is_shaped_too(able: None) -> None:
    """Two send 1 MB each to a third at once: its link brings no more than its rate, so it takes 2 MB at 50 Mbit/s."""
    send = (
        "import socket, sys; s = socket.create_connection(('10.0.0.1', int(sys.stdin.read()))); "
        "s.sendall(b'.' * 1_000_000); s.close()"
    )
    take = (
        "import socket, sys, time; server = socket.socket(fileno=int(sys.stdin.read())); "
        "peers = [server.accept()[0] for _ in range(2)]; start = time.perf_counter()\n"
        "for peer in peers:\n    while peer.recv(1 << 20): pass\nprint(time.perf_counter() - start)"
    )
    with shaped.links(3, 50e6) as made, listening(made.places[0]) as server:
        port = str(server.getsockname()[1])
        python = (sys.executable, "-ISc")
        ranks = [Rank((*python, take), made.places[0], str(server.fileno()), handles=(server.fileno(),))]
        ranks += [Rank((*python, send), place, port) for place in made.places[1:]]
        took = float(run_ranks(ranks, 60)[0])
    assert took > 0.8 * 2e6 * 8 / 50e6


def test_a_run_that_fails_takes_its_links_down(able: None) -> None:
    before = namespaces()
    with pytest.raises(RunFailed), shaped.links(2, None) as made:
        run_ranks([Rank((sys.executable, "-ISc", "raise SystemExit(1)"), made.places[0])], 20)
    assert namespaces() == before


def test_links_of_a_killed_owner_are_swept_and_nothing_else(able: None) -> None:
    code = (
        "import time\nfrom steptime.cluster.links import links\n"
        "with links(2, None): print('up', flush=True); time.sleep(600)"
    )
    others = ["steptime-me", "steptime-1-2-x", f"foreign-{os.getpid()}"]
    for name in others:
        subprocess.run(["ip", "netns", "add", name], check=True)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        shaped.sweep()
        alive = [found for found in list_links() if found.owner == owner.pid]
        assert len(alive) == 1, "a living owner's links stay"
        assert alive[0].is_alive
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        (dead,) = [found for found in list_links() if found.owner == owner.pid]
        assert not dead.is_alive
        with shaped.links(2, None):
            assert [found.owner for found in list_links() if found.owner == owner.pid] == []
            assert set(others) <= namespaces()
    finally:
        owner.kill()
        owner.wait()
        for name in others:
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_a_process_id_given_again_is_not_the_owner(able: None) -> None:
    name = f"steptime-{os.getpid()}-1-w0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert [found.is_alive for found in list_links() if name in found.namespaces] == [False]
    assert name in shaped.sweep()
    assert name not in namespaces()


def test_held_links_stay_until_they_are_taken_down(able: None) -> None:
    if any(found.owner == shaped.HELD for found in list_links()):
        shaped.down()
    command = [str(Path(sys.executable).with_name("steptime")), "links"]

    def steptime(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True)

    try:
        up = steptime("up", "--workers", "2", "--rate", "100mbit")
        assert up.returncode == 0, up.stderr
        assert "steptime-0-0-w1" in up.stdout
        assert "measured" in up.stdout
        again = steptime("up", "--workers", "2")
        assert again.returncode == 2
        assert again.stderr == "steptime: links are up already; take them down first: steptime links down\n"
        assert "steptime-0-0-switch" in steptime("list").stdout
        time.sleep(0.1)
        assert "steptime-0-0-w0" in namespaces()
    finally:
        down = steptime("down")
    assert down.returncode == 0
    assert not [name for name in namespaces() if name.startswith("steptime-0-")]


def test_a_rate_is_bound_by_the_processor_from_a_third_of_the_machines_own_throughput() -> None:
    made = Links((), 1e9, Measured(1e-5, 8e-9), Measured(1e-5, 8e-10))
    assert not made.is_cpu_bound(3)
    assert made.is_cpu_bound(4)


@pytest.mark.parametrize("workers", [1, 0, 201])
def test_a_link_has_two_ends(able: None, workers: int) -> None:
    with pytest.raises(InputError, match=f"workers = {workers}: must be from 2 to 200"):
        shaped.up(workers, None)
