"""The command on good and on bad input: one line, exit status 2, and nothing started."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Checkout
from planted_report import campaign

from steptime.core.campaign import write_campaign

# Every Python process that is started leaves a line: the command itself, a kernel, a framework's child.
WITNESS = "import os, sys\nopen(os.environ['WITNESS'], 'a').write(repr(sys.orig_argv) + chr(10))\n"


@pytest.fixture
def refused(checkout: Checkout, tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused: exit status 2, one line (returned), no other Python process started."""
    (tmp_path / "witness").mkdir()
    (tmp_path / "witness/sitecustomize.py").write_text(WITNESS)
    log = tmp_path / "started"

    def run(*command: str) -> str:
        path = os.pathsep.join([str(tmp_path / "witness"), checkout.environment["PYTHONPATH"]])
        done = checkout.run(*command, PYTHONPATH=path, WITNESS=str(log))
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert len(log.read_text().splitlines()) == 1
        return line

    return run


def plant_campaign(checkout: Checkout) -> Path:
    """A small valid campaign in the copy's data/campaigns."""
    folder = checkout.root / "data/campaigns/planted"
    write_campaign(campaign("planted"), folder)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quick.measure.roundz": 3}, ["quick.measure", "roundz", "unknown"]),
        ({"quick.measure.rounds": None}, ["quick.measure", "rounds", "missing"]),
        ({"quick.measure.networks": ["mlp", "vgg"]}, ["'vgg'", "mlp, lenet, alexnet, googlenet, resnet50"]),
        ({"quick.measure.frameworks": ["theeno"]}, ["'theeno'", "torch, "]),
        ({"quick.measure.batch": {"mlp": -4}, "quick.measure.networks": ["mlp"]}, ["batch.mlp", "-4"]),
        ({"quick.measure.rounds": "five"}, ["quick.measure.rounds", "'five'", "int"]),
        ({"quick.measure.budget_s": float("inf")}, ["budget_s"]),
        ({"size": "medium"}, ["size", "'medium'", "quick, full"]),
        ({"quick.messure": {}}, ["quick", "'messure'", "measure"]),
        ({"quick": 5}, ["quick = 5", "mapping"]),
        ({"quick.machine.threads": 0}, ["machine", "threads = 0", "1 to"]),
        ({"quick.machine.seconds": -2.0}, ["machine", "seconds = -2.0"]),
        ({"quick.measure.threads": []}, ["threads = []"]),
        ({"quick.measure.budget_s": -1.0}, ["budget_s = -1.0"]),
        ({"quick.predict.workers": []}, ["predict", "workers = []", "above 0"]),
        ({"quick.predict.workers": [1, 0]}, ["predict", "workers = [1, 0]"]),
        ({"quick.summary.workers": -1}, ["summary", "workers = -1"]),
        ({"quick.single_device.memory_gib": -1.0}, ["single_device", "memory_gib = -1.0", "above 0"]),
    ],
)
def test_a_bad_value_in_params_yaml(
    checkout: Checkout, refused: Callable[..., str], change: dict[str, object], said: list[str]
) -> None:
    """Refused by the pipeline's first stage, before DVC deletes any other stage's outs."""
    checkout.edit_params(**change)
    line = refused("steptime", "fingerprint")
    assert line.startswith("steptime: params.yaml: ")
    assert not [word for word in said if word not in line], line


def test_params_yaml_that_is_not_yaml(checkout: Checkout, refused: Callable[..., str]) -> None:
    (checkout.root / "params.yaml").write_text("size: quick\nquick: [1,\n")
    assert "line 3" in refused("steptime", "run", "fit")


def test_a_key_of_params_yaml_that_comes_twice(checkout: Checkout, refused: Callable[..., str]) -> None:
    path = checkout.root / "params.yaml"
    path.write_text(path.read_text().replace("size: quick\n", "size: quick\nsize: full\n", 1))
    line = refused("steptime", "fingerprint")
    assert "key 'size' is there on line" in line
    assert "mend the line" in line


def test_a_plan_of_nothing(checkout: Checkout, refused: Callable[..., str]) -> None:
    (checkout.root / "plan.json").write_text("{}")
    assert "plan.json: key 'frameworks' is missing" in refused("steptime", "measure", "--plan", "plan.json")


def test_checking_a_campaign_of_unknown_names(checkout: Checkout, refused: Callable[..., str]) -> None:
    """A framework that is not ours is told, a network refused, by `campaign check` as before any notebook runs."""
    folder = plant_campaign(checkout)
    runs = folder / "runs.csv"
    whole = runs.read_text()
    runs.write_text(whole.replace(",tensorflow,", ",darknet,"))
    done = checkout.run("steptime", "campaign", "check", "data/campaigns/planted")
    assert done.returncode == 0
    assert "runs finished" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: data/campaigns/planted/runs.csv: line ")
    assert "framework = 'darknet': is none of this version's" in line
    runs.write_text(whole.replace(",alexnet,", ",alexnett,"))
    for command in (("campaign", "check", "data/campaigns/planted"), ("run", "fit")):
        line = refused("steptime", *command)
        assert "runs.csv: line " in line
        assert "network = 'alexnett': is not described here" in line
        (checkout.root.parent / "started").unlink()


def test_an_unknown_notebook(refused: Callable[..., str]) -> None:
    assert "'messure'" in refused("steptime", "run", "messure")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--network", "vgg"], "'vgg'"),
        (["--framework", "theeno"], "'theeno'"),
        (["--batch", "-4"], "-4"),
        (["--threads", "0"], "0"),
        (["--size", "medium"], "'medium'"),
        (["--batch", "many"], "'many'"),
        (["--bach", "4"], "--bach"),
        (["--rounds", "0"], "rounds = 0"),
        (["--budget", "0"], "budget_s = 0"),
        (["--size", ""], "size = ''"),
        (["--threads", "1", "--threads", "1"], "twice"),
        (["--out", "README.md"], "--out = 'README.md'"),
        (["--out", "/"], "--out = '/'"),
    ],
)
def test_a_bad_option_of_measure(refused: Callable[..., str], options: list[str], said: str) -> None:
    assert said in refused("steptime", "measure", *options)


def test_a_campaign_without_a_column(checkout: Checkout, refused: Callable[..., str]) -> None:
    runs = plant_campaign(checkout) / "runs.csv"
    runs.write_text(runs.read_text().replace("case_id", "case", 1))
    line = refused("steptime", "run", "fit")
    assert "runs.csv" in line
    assert "'case_id'" in line


def test_a_campaign_with_a_broken_row(checkout: Checkout, refused: Callable[..., str]) -> None:
    samples = plant_campaign(checkout) / "samples.csv"
    lines = samples.read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[6], "fast")
    samples.write_text("\n".join(lines) + "\n")
    line = refused("steptime", "run", "fit")
    assert "samples.csv: line 4" in line
    assert "fast" in line


def test_outside_a_checkout(tmp_path: Path) -> None:
    done = Checkout(ROOT).run("steptime", "doctor", prefix=("env", "-C", str(tmp_path)))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "dvc.yaml" in done.stderr


def test_another_checkout_s_steptime_is_refused(checkout: Checkout) -> None:
    """DVC hashes this checkout's code, so that code must be what runs."""
    done = checkout.run("steptime", "run", "fit", PYTHONPATH=str(ROOT / "lib"))
    assert done.returncode == 2
    assert "activate" in done.stderr


def test_help_names_every_command() -> None:
    done = Checkout(ROOT).run("steptime", "--help")
    commands = ["benchmarks", "campaign", "doctor", "fingerprint", "measure", "notebooks", "predict", "run", "site"]
    assert not [name for name in commands if f"  {name} " not in done.stdout]


def test_a_closed_pipe_is_no_traceback(root: Path) -> None:
    executable = Path(sys.executable).parent / "steptime"
    done = subprocess.run(["bash", "-c", f"'{executable}' --help | true"], cwd=root, capture_output=True)
    assert done.stderr == b""


OBSERVED = "group,workers,nodes,local_batch,step_time_s,step_time_std_s\na,1,1,32,0.10,\na,4,1,32,0.12,0.001\n"
POINTS = "group,workers,nodes,local_batch\na,16,4,32\n"


def test_extrapolate_predicts_every_point(tmp_path: Path) -> None:
    (tmp_path / "obs.csv").write_text(OBSERVED)
    (tmp_path / "at.csv").write_text(POINTS)
    files = {"--observed": "obs.csv", "--at": "at.csv", "--out": "pred.csv"}
    options = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    done = Checkout(ROOT).run("steptime", "extrapolate", *options)
    assert done.returncode == 0, done.stderr
    header, row = (tmp_path / "pred.csv").read_text().splitlines()
    assert header == "group,workers,nodes,local_batch,step_time_s,lo_s,hi_s,model"
    step, lo, hi = (float(value) for value in row.split(",")[4:7])
    assert 0 < lo < step < hi


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (OBSERVED.replace("a,4,1", "a,0,1"), "obs.csv: line 3: workers = 0"),
        (OBSERVED.replace("0.12", "nan"), "obs.csv: line 3: step_time_s = nan"),
        (OBSERVED.replace("step_time_s,", "time,"), "column 'step_time_s' is missing"),
        (OBSERVED + "a,1,1,32,0.11,\n", "line 4"),
    ],
)
def test_bad_observations_leave_no_predictions(refused: Callable[..., str], tmp_path: Path, observed, said) -> None:
    (tmp_path / "obs.csv").write_text(observed)
    (tmp_path / "at.csv").write_text(POINTS)
    files = {f"--{name}": str(tmp_path / f"{file}.csv") for name, file in (("observed", "obs"), ("at", "at"))}
    out = tmp_path / "pred.csv"
    line = refused("steptime", "extrapolate", *[word for pair in files.items() for word in pair], "--out", str(out))
    assert said in line
    assert not out.exists()
