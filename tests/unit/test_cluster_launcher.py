"""Many processes as one run: whatever ends first, all end, the error says what happened, and nothing is left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import gone

from steptime.cluster.launcher import Place, Rank, RunFailed, free_ports, listening, resolved, run_ranks
from steptime.core.errors import InputError

FOREVER = "import time; time.sleep(600)"


def rank(code: str, **how: object) -> Rank:
    return Rank((sys.executable, "-ISc", code), **how)  # type: ignore[arg-type]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_each_rank_reads_its_own_input_and_environment() -> None:
    code = "import os, sys; print(os.environ['RANK'], sys.stdin.read())"
    ranks = [rank(code, stdin=f"job {number}", environment={"RANK": str(number)}) for number in range(3)]
    assert run_ranks(ranks, 20) == ["0 job 0\n", "1 job 1\n", "2 job 2\n"]


def test_much_output_blocks_nobody() -> None:
    (said,) = run_ranks([rank("print('x' * 2_000_000)")], 20)
    assert len(said) == 2_000_001


def test_a_rank_that_fails_ends_the_others_and_is_named_with_its_last_lines() -> None:
    pids: list[int] = []
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"^rank 1 ended with status 3; it said last: two \| three \| four$") as found:
        run_ranks(
            [rank(FOREVER), rank("import sys; print('one\\ntwo\\nthree\\n\\nfour', file=sys.stderr); sys.exit(3)")],
            60,
            pids.extend,
        )
    assert found.value.rank == 1
    assert time.monotonic() - begun < 10
    assert gone(pids)


def test_the_killed_rank_is_named_and_not_the_one_that_missed_it() -> None:
    # The second rank ends by itself as soon as its peer is gone, as one does whose connection breaks.
    watching = "import os, sys, time; pid = int(sys.stdin.read())\nwhile os.path.exists(f'/proc/{pid}/exe'): pass"
    victim = subprocess.Popen([sys.executable, "-ISc", FOREVER])
    try:
        killer = f"import os, time; time.sleep(0.2); os.kill({victim.pid}, 9); os.kill(os.getpid(), 9)"
        fails = f"{watching}\nsys.exit('connection closed by peer')"
        with pytest.raises(RunFailed, match=r"rank 1 was ended by SIGKILL$"):
            run_ranks([rank(fails, stdin=str(victim.pid)), rank(killer)], 60)
    finally:
        victim.kill()
        victim.wait()


def test_a_run_without_end_is_ended() -> None:
    pids: list[int] = []
    with pytest.raises(RunFailed, match=r"ranks 1 did not end in 0\.5 s; all were ended"):
        run_ranks([rank(""), rank(FOREVER)], 0.5, pids.extend)
    assert gone(pids)


def test_what_a_rank_started_ends_with_it() -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-ISc', {FOREVER!r}]).pid)"
    (said,) = run_ranks([rank(code)], 20)
    assert gone([int(said)])


def test_a_hundred_kills_leave_nothing() -> None:
    before, generator = children(), random.Random(5)
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        pids: list[int] = []

        def kill_one(started: list[int], pids: list[int] = pids) -> None:
            pids.extend(started)
            time.sleep(generator.uniform(0, 0.03))
            os.kill(generator.choice(started), signal.SIGKILL)

        with pytest.raises(RunFailed, match=r"rank [01] was ended by SIGKILL"):
            run_ranks([rank(FOREVER), rank(FOREVER)], 60, kill_one)
        assert gone(pids)
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.03, 0.1, 0.3])
def test_the_ranks_die_with_a_killed_parent(moment_s: float, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import sys, pathlib; from steptime.cluster.launcher import *\n"
        f"forever = Rank((sys.executable, '-ISc', {FOREVER!r}))\n"
        f"write = lambda pids: pathlib.Path({str(pids)!r}).write_text(' '.join(map(str, pids)))\n"
        "run_ranks([forever] * 3, 60, write)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (pids.exists() and len(pids.read_text().split()) == 3):
        time.sleep(0.002)
    time.sleep(moment_s)
    parent.kill()
    parent.wait()
    assert gone([int(pid) for pid in pids.read_text().split()])


def test_an_interruption_ends_the_ranks() -> None:
    pids: list[int] = []

    def interrupt(started: list[int]) -> None:
        pids.extend(started)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks([rank(FOREVER)] * 3, 60, interrupt)
    assert gone(pids)


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(RunFailed, match=r"rank 0 .* said last: no-such-program: cannot be started \(No such"):
        run_ranks([Rank(("no-such-program",))], 20)


def test_a_taken_port_is_one_line() -> None:
    with listening(Place()) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=rf"^127.0.0.1, port {port}: Address already in use; choose another port"):
            listening(Place(), port)


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        listening(Place(), port).close()


def test_a_host_that_does_not_resolve_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^host = 'no-such-host.invalid': does not resolve \(.+\); correct it"):
        resolved("no-such-host.invalid")
    assert resolved("127.0.0.1") == "127.0.0.1"
