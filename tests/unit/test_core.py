"""Core types: files are whole and rounded, bad input is one line, claims are decided by checked figures only."""

import os

import pytest

from steptime.core.claims import Figure, decide, read_paper
from steptime.core.errors import InputError
from steptime.core.files import project_root, read_json, read_yaml, rounded, write_json, write_text, write_texts
from steptime.core.machine import read_machine
from steptime.core.network import Layer, Network, Parameter
from steptime.core.step import Task, Timeline

MACHINE = """
name: planted
device: cpu
cores: 2
memory_bytes: 8000000000
peak_flops_per_s: 1.0e+11
memory_bytes_per_s: 1.0e+10
links:
  - {name: loop, alpha_s: 1.0e-5, beta_s_per_byte: 1.0e-9, source: planted}
source: planted for a test
"""


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_rounding_reaches_every_float_and_leaves_counts_alone():
    assert rounded({"a": [1.23456789, 7, True, None, "x"], "b": {"c": float("nan")}}) == {
        "a": [1.23457, 7, True, None, "x"],
        "b": {"c": None},
    }


def test_json_round_trip_is_byte_stable(tmp_path):
    path = tmp_path / "a folder" / "x.json"
    write_json(path, {"b": 1 / 3, "a": [2]})
    first = path.read_bytes()
    write_json(path, read_json(path))
    assert path.read_bytes() == first


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    write_text(path, "old")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (MACHINE.replace("cores: 2", "cores: -2"), "cores = -2"),
        (MACHINE.replace("device: cpu", ""), "'device' is missing"),
        (MACHINE.replace("device: cpu", "device: cpu\ndevize: gpu"), "unknown key 'devize'"),
        (MACHINE.replace("1.0e-9", "fast"), "links.0.beta_s_per_byte = 'fast'"),
        ("a: [1", "line"),
        ("- a\n- b", "mapping"),
        ("", "mapping"),
    ],
)
def test_a_bad_machine_is_one_line_with_file_key_and_value(tmp_path, content, said):
    path = tmp_path / "my machine.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        read_machine(path)
    text = one_line(error)
    assert str(path) in text
    assert said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (MACHINE + "cores: 4\n", "line 11: not valid YAML (key 'cores' is there on line 4 already)"),
        (
            MACHINE.replace("alpha_s: 1.0e-5", "alpha_s: 1.0e-5, alpha_s: 2.0e-5"),
            "line 9: not valid YAML (key 'alpha_s'",
        ),
        (MACHINE + '"cores": 2\n', "key 'cores' is there on line 4 already"),
    ],
)
def test_a_key_that_comes_twice_is_refused_with_its_lines(tmp_path, content, said):
    path = tmp_path / "planted.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        read_machine(path)
    assert one_line(error).startswith(f"{path}: line ")
    assert said in str(error.value)


def test_a_key_that_overrides_a_merged_one_does_not_come_twice(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


def test_a_good_machine_is_read(tmp_path):
    path = tmp_path / "planted.yaml"
    path.write_text(MACHINE)
    machine = read_machine(path)
    assert machine.cores == 2
    assert machine.links[0].beta_s_per_byte == 1e-9


@pytest.mark.parametrize("place", ["a-file/below", "folder", "pipe", "/dev/null", "/proc/x.csv", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_line_and_unharmed(tmp_path, place):
    (tmp_path / "a-file").write_text("kept")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError) as error:
        write_text(tmp_path / place, "text")
    assert "choose another place" in one_line(error)
    assert (tmp_path / "a-file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "folder", "pipe"]
    assert os.stat("/dev/null").st_rdev == os.makedev(1, 3)


def test_files_that_belong_together_are_all_written_or_none(tmp_path):
    (tmp_path / "one").write_text("old")
    (tmp_path / "two").mkdir()
    with pytest.raises(InputError):
        write_texts({tmp_path / "one": "new", tmp_path / "two": "new"})
    assert (tmp_path / "one").read_text() == "old"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_missing_and_binary_files_are_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_json(binary)
    with pytest.raises(InputError, match="not inside a steptime checkout"):
        project_root(tmp_path)


def test_a_paper_is_named_like_its_file(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("{id: one, citation: c, link: l, figures: []}")
    with pytest.raises(InputError, match="must equal the file's name"):
        read_paper(path)


def test_an_unverified_figure_never_decides():
    figure = Figure(id="f", text="t", value=1, unit="s", where="recalled", conditions="", verified=False)
    assert decide(figure, True) == decide(figure, False) == "unverified source"
    checked = figure.model_copy(update={"verified": True})
    assert decide(checked, True) == "holds"
    assert decide(checked, False) == "does not hold here"
    assert decide(checked, False, in_shape=True) == "holds in shape"


def test_network_crosses_as_json_unchanged():
    layer = Layer("fc", "dense", ("input",), ((4,),), (3,), {"features": 3}, (Parameter("weight", (3, 4)),), 24, 24)
    network = Network("planted", "quick", (4,), 3, (layer,))
    assert Network.from_json(network.to_json()) == network
    assert network.parameter_count == 12
    assert network.activation_count == 3


def test_a_timeline_ends_with_its_last_task():
    assert Timeline("modelled", ()).end_s == 0
    assert Timeline("modelled", (Task("a", "device", 0, 0, 2), Task("b", "link", 0, 1, 5))).end_s == 5


@pytest.mark.parametrize(
    ("read", "name", "text"),
    [
        (read_json, "deep.json", "[" * 100_000),
        (read_json, "long.json", "[" + "9" * 5000 + "]"),
        (read_yaml, "day.yaml", "size: 2020-13-45"),
    ],
)
def test_what_a_parser_chokes_on_is_one_line(tmp_path, read, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=name) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)
