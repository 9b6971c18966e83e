"""Comparing two campaigns: what is found, what is not, and what is refused; on planted campaigns."""

from pathlib import Path

import numpy as np
import planted_campaign
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steptime.cli import cli
from steptime.core.campaign import RUNS, SAMPLES, Campaign, as_table, read_campaign, write_campaign
from steptime.core.comparing import (
    COMPARE_LEVEL,
    FEWEST_OTHERS,
    POWER,
    NotComparable,
    _power,
    changes,
    compare_campaigns,
    median_of_others,
    rounds_needed,
    summary_lines,
)
from steptime.core.errors import EXIT_STATUSES, NOT_COMPARABLE, SLOWER, InputError
from steptime.measure.compare_benchmark import Noise, draw, rates, recorded_noise, rounds_for
from steptime.measure.plan import Case
from steptime.report.markup import faults

FRAMEWORKS = ("torch", "tensorflow", "jax", "caffe")
NETWORKS = ("lenet", "alexnet", "googlenet")
CASES = [Case(framework, network, "quick", 8, "float32", "cpu", 1, "sequential") for framework in FRAMEWORKS for network
         in NETWORKS]  # fmt: skip
ROUNDS = 8
SPREAD = 0.004


def planted(
    name: str,
    seed: int,
    factors: dict[str, float] | None = None,
    cases: list[Case] = CASES,
    minute: int | None = None,
    **columns,
) -> Campaign:
    """A campaign whose processes spread by SPREAD; `factors`: of cases' step times; the rest are columns of runs.csv,
    one value, or a function of (case, round). Round r of all cases starts at minute `minute` + 2 r, by default that of
    campaign "a" from 0 on, and that of others when it has ended."""
    minute = (0 if name == "a" else 30) if minute is None else minute
    rng = np.random.default_rng(seed)
    runs, samples = [], []
    for case in cases:
        for number in range(ROUNDS):
            own = {"started_utc": f"2026-01-01T12:{minute + 2 * number:02d}:00Z"}
            own |= {key: value(case, number) if callable(value) else value for key, value in columns.items()}
            run = planted_campaign._run(case, number, "finished") | own
            time_s = planted_campaign.step_s(case) * (factors or {}).get(case.case_id, 1.0)
            time_s *= float(np.exp(SPREAD * rng.normal()))
            runs.append(run)
            shared = {"run_id": run["run_id"], "phase": "step", "is_warmup": False, "is_disturbed": False}
            samples += [shared | {"repeat": repeat, "time_s": time_s * (1 + 0.001 * repeat)} for repeat in range(3)]
    return Campaign(name, as_table(runs, RUNS), as_table(samples, SAMPLES))


def everything(factor: float, **others: float) -> dict[str, float]:
    return {case.case_id: factor for case in CASES} | others


def test_equal_campaigns_are_not_told_apart() -> None:
    found = compare_campaigns(planted("a", 1), planted("b", 2))
    assert (found.table["verdict"] == "").all()
    assert ((found.table["lo"] < 1) & (found.table["hi"] > 1)).all()
    assert found.status == 0
    assert not found.alternating


def test_a_slower_case_is_found_under_drift_of_the_whole_machine() -> None:
    slow = CASES[4].case_id
    found = compare_campaigns(planted("a", 1), planted("b", 2, everything(1.10) | {slow: 1.10 * 1.03}))
    row = found.table.iloc[0]
    assert (row["case_id"], row["verdict"], found.status) == (slow, "slower", SLOWER)
    assert row["lo"] < 1.03 < row["hi"]
    assert row["measured"] == pytest.approx(1.133, rel=0.01)
    assert (found.table["verdict"][1:] == "").all()
    assert found.shared is not None
    assert found.shared[0] == pytest.approx(1.10, rel=0.01)
    assert any("may be drift" in line for line in summary_lines(found))


def test_drift_alone_decides_nothing_unless_the_campaigns_alternate() -> None:
    a, b = planted("a", 1), planted("b", 2, everything(1.05))
    assert compare_campaigns(a, b).status == 0
    alternating = compare_campaigns(a, planted("b", 2, everything(1.05), minute=1))
    assert alternating.alternating
    assert alternating.status == SLOWER
    assert alternating.all_slower
    assert (alternating.table["verdict"] == "").all()
    assert any("all cases together" in line and "changed" in line for line in summary_lines(alternating))


def test_rounds_that_start_before_the_others_ended_do_not_alternate() -> None:
    assert not compare_campaigns(planted("a", 1), planted("b", 2, minute=3)).alternating


def test_a_faster_case_is_told_and_is_no_failure() -> None:
    found = compare_campaigns(planted("a", 1), planted("b", 2, {CASES[0].case_id: 0.9}))
    assert found.table["verdict"].iloc[0] == "faster"
    assert found.status == 0


def test_different_machines_are_compared_without_a_verdict() -> None:
    found = compare_campaigns(planted("a", 1), planted("b", 2, everything(1.5), cpu_model="Another CPU"))
    assert found.status == NOT_COMPARABLE
    assert found.shared is None
    assert found.table["ratio"].to_numpy() == pytest.approx(1.5, rel=0.02)
    assert (found.table["verdict"] == "slower").all()
    assert "different machines (cpu_model: Planted CPU / Another CPU): nothing is pooled" in summary_lines(found)[1]


def test_a_changed_version_is_no_yardstick() -> None:
    """Half of the cases have a new version and are all slower: the others say that the machine has not drifted."""
    new = [case.case_id for case in CASES if case.framework in ("torch", "jax")]
    b = planted("b", 2, dict.fromkeys(new, 1.04), framework_version=lambda case, _: "2" if case.case_id in new else "1")
    found = compare_campaigns(planted("a", 1, framework_version="1"), b)
    assert set(found.table.loc[found.table["verdict"] == "slower", "case_id"]) == set(new)
    assert "framework_version of jax, torch: 1 / 2" in found.differences


@pytest.mark.parametrize(
    ("column", "values"),
    [("framework_version", ("1", "2")), ("cpu_model", ("One CPU", "Another CPU")), ("code_hash", ("c0de", "c0da"))],
)
def test_runs_of_one_case_of_two_kinds_are_not_pooled(column: str, values: tuple[str, str]) -> None:
    mixed = planted("mixed", 1, **{column: lambda _, number: values[number % 2]})
    with pytest.raises(NotComparable, match=f"campaign mixed: .*{column}: its runs have {values[0]} and {values[1]}"):
        compare_campaigns(mixed, planted("b", 2))


def test_a_case_that_no_longer_runs_is_a_failure() -> None:
    b = planted("b", 2)
    is_lost = b.runs["case_id"] == CASES[3].case_id
    b.runs.loc[is_lost, ["status", "reason"]] = ["failed", "it broke"]
    gone = set(b.runs.loc[is_lost, "run_id"])
    found = compare_campaigns(planted("a", 1), Campaign("b", b.runs, b.samples[~b.samples["run_id"].isin(gone)]))
    assert found.lost == ((CASES[3].case_id, "it broke"),)
    assert found.status == SLOWER
    assert f"{CASES[3].case_id}: runs in A, not in B: it broke" in summary_lines(found)


def test_few_cases_have_a_verdict_only_when_alternating() -> None:
    few = CASES[:FEWEST_OTHERS]
    slow = {few[0].case_id: 1.03}
    apart = compare_campaigns(planted("a", 1, cases=few), planted("b", 2, slow, few))
    assert apart.status == NOT_COMPARABLE
    assert any("too few cases (4, more than 4 are needed)" in line for line in summary_lines(apart))
    alternating = compare_campaigns(planted("a", 1, cases=few), planted("b", 2, slow, few, minute=1))
    assert alternating.status == SLOWER
    assert list(alternating.table["verdict"]) == ["slower", "", "", ""]


def test_cases_of_one_campaign_are_counted_and_none_in_both_is_bad_input() -> None:
    found = compare_campaigns(planted("a", 1, cases=CASES[:8]), planted("b", 2, cases=CASES[2:]))
    assert len(found.table) == 6
    assert any(line.startswith("only in B: 4 cases: ") for line in summary_lines(found))
    with pytest.raises(InputError, match="no case in common"):
        compare_campaigns(planted("a", 1, cases=CASES[:2]), planted("b", 2, cases=CASES[2:]))


@given(arrays(float, (3, 6), elements=st.one_of(st.floats(-5, 5), st.just(np.nan))))
def test_the_median_of_others_is_numpys(values: np.ndarray) -> None:
    found = median_of_others(values)
    for row in range(3):
        for case in range(6):
            others = np.delete(values[row], case)
            others = others[np.isfinite(others)]
            expected = np.median(others) if len(others) else np.nan
            assert found[row, case] == pytest.approx(expected, nan_ok=True)


def test_rounds_needed_are_the_fewest_with_that_power() -> None:
    needed = rounds_needed(0.02, 10)
    assert _power(needed, 0.02, 10, 1.03, COMPARE_LEVEL) >= POWER > _power(needed - 1, 0.02, 10, 1.03, COMPARE_LEVEL)
    assert rounds_needed(0.04, 10) == pytest.approx(4 * needed, rel=0.15)


def test_equal_campaigns_rarely_alarm_and_three_percent_is_found() -> None:
    """A smaller form of `steptime benchmarks compare`, at a noise as recorded: 2 % to 6 % a process, drift, blocks."""
    noise = Noise(np.linspace(0.02, 0.06, 12), np.arange(12) % 3, network=0.015, drift=0.03)
    found = rates(noise, rounds_for(noise), pairs=200)
    assert found.met
    assert found.alarms <= 0.05 * 200
    assert found.found >= 0.9 * 200
    few = rates(noise, 6, pairs=200)
    assert few.alarms <= 0.05 * 200
    assert few.found < 0.5 * 200, "six rounds do not suffice at this noise"


def test_without_the_yardstick_drift_alarms() -> None:
    """The yardstick is what keeps slow drift from passing for a change."""
    noise = Noise(np.full(12, 0.01), np.zeros(12, dtype=int), network=0.0, drift=0.03)
    rng = np.random.default_rng(5)
    alarms = {True: 0, False: 0}
    for _ in range(60):
        a, b = draw(noise, 10, 2, rng)
        for kept in alarms:
            found, _ = changes(a, b, np.ones(12, dtype=bool) if kept else None, alternating=False)
            alarms[kept] += bool((found.p_value < COMPARE_LEVEL).any())
    assert alarms[True] <= 3
    assert alarms[False] >= 15


def test_noise_is_told_from_a_campaign() -> None:
    noise = Noise(np.full(12, 0.03), np.repeat(np.arange(3), 4), network=0.0, drift=0.02)
    logs = draw(noise, ROUNDS, 1, np.random.default_rng(3))[0]
    a = planted("a", 1)
    numbers = {case.case_id: place for place, case in enumerate(CASES)}
    joined = a.samples.merge(a.runs[["run_id", "case_id", "round"]], on="run_id")
    shift = [logs[number, numbers[case]] for number, case in zip(joined["round"], joined["case_id"], strict=True)]
    found = recorded_noise(Campaign("a", a.runs, a.samples.assign(time_s=a.samples["time_s"] * np.exp(shift))))
    assert found.cases == 12
    assert np.median(found.process) == pytest.approx(0.03, rel=0.35)
    assert found.drift == pytest.approx(logs.mean(axis=1).std(ddof=1), rel=0.35)
    two = a.runs["round"] < 2
    kept = a.samples["run_id"].isin(a.runs.loc[two, "run_id"])
    with pytest.raises(InputError, match="12 cases have all of its 2 rounds"):
        recorded_noise(Campaign("a", a.runs[two], a.samples[kept]))


def test_the_command_writes_tables_and_pages_and_has_statuses_of_its_own(tmp_path: Path) -> None:
    assert len({0, 1, 2, SLOWER, NOT_COMPARABLE} & set(EXIT_STATUSES)) == 5
    for name, campaign in (("a", planted("a", 1)), ("b", planted("b", 2, {CASES[4].case_id: 1.03}))):
        write_campaign(campaign, tmp_path / name)
    write_campaign(planted("far", 3, cpu_model="Another CPU"), tmp_path / "far")
    assert len(read_campaign(tmp_path / "b").runs) == len(CASES) * ROUNDS

    def run(*arguments: str):
        return CliRunner().invoke(cli, ["compare", *arguments], standalone_mode=False)

    a, b, far = (str(tmp_path / name) for name in ("a", "b", "far"))
    assert run(a, a).exit_code == 0
    found = run(a, b, "--out", str(tmp_path / "page.html"))
    assert found.exit_code == SLOWER
    assert "slower" in found.output
    assert faults(tmp_path, [tmp_path / "page.html"]) == []
    text = (tmp_path / "page.html").read_text()
    assert "1 slower, 0 faster, 11 not told apart" in text
    assert "caffe alexnet b8" in text
    assert run(a, b, "--out", str(tmp_path / "table.csv")).exit_code == SLOWER
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + len(CASES)
    assert run(a, far).exit_code == NOT_COMPARABLE
    for bad in ((a, "no-such-campaign"), (a, b, "--out", str(tmp_path / "x.txt"))):
        assert isinstance(run(*bad).exception, InputError)
    assert not (tmp_path / "x.txt").exists()
