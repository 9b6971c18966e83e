"""Tables of measured collectives: nccl-tests' text and JSON, OSU's text, CSV; what is wrong with them, in one line."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.model.observations import COLLECTIVES, check_observed
from steptime.traces.collectives import Placement, read_collectives

NCCL = """\
# nThread 1 nGpus 1 minBytes 0 maxBytes 33554432 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid    100 on      left device  0 [0000:04:00] Some GPU 80GB
#  Rank  1 Group  0 Pid    101 on      left device  1 [0000:05:00] Some GPU 80GB
#  Rank  2 Group  0 Pid    102 on     right device  0 [0000:04:00] Some GPU 80GB
#  Rank  3 Group  0 Pid    103 on     right device  1 [0000:05:00] Some GPU 80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     9.10    0.00    0.00      0     9.05    0.00    0.00      0
        1024           256     float     sum      -1    33.10    0.03    0.05      0    31.50    0.03    0.05    N/A
    33554432       8388608     float     sum      -1    12646    2.65    3.98      0    12641    2.65    3.98      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 1.5
"""
NCCL_JSON = {
    "version": 2,
    "config": {"nthreads": 1, "devices": [{"rank": 0, "hostname": "left"}, {"rank": 1, "hostname": "left"}]},
    "results": [
        {"size": 0, "count": 0, "type": "float", "in_place": {"time": 9.0}},
        {"size": 1024, "count": 256, "out_of_place": {"time": 33.0, "nwrong": 0.0}, "in_place": {"time": 31.5}},
        {"size": 4096, "count": 1024, "out_of_place": {"time": 40.25}, "in_place": None},
    ],
}
OSU = """\
some launcher says hello

# OSU MPI-CUDA Allreduce Latency Test v7.4
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       4.34              4.10              4.60        1000
1048576              1234.56           1200.00           1300.00         100
"""
CSV = "group,workers,nodes,n_bytes,time_s,time_std_s\na,4,2,1000,0.001,\na,4,2,2000,0.0015,0\na,8,2,1000,1e-3,2e-5\n"
FOUR = Placement("ours", 4, 2)


def write(tmp_path, text, name="file.txt"):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_nccl_tests_text(tmp_path):
    table = read_collectives([write(tmp_path, NCCL)], Placement("ours"))
    assert table[["group", "workers", "nodes", "n_bytes"]].to_numpy().tolist() == [
        ["ours", 4, 2, 1024],
        ["ours", 4, 2, 33554432],
    ]
    np.testing.assert_allclose(table["time_s"], [31.5e-6, 12641e-6])
    assert table["time_std_s"].isna().all()


def test_nccl_tests_text_of_a_program_without_an_operation(tmp_path):
    """all_gather leaves redop blank, so rows have fewer words than the head; times are counted from the end."""
    text = NCCL.replace("   sum  ", "        ").replace("     sum", "        ")
    table = read_collectives([write(tmp_path, text)], Placement("ours"))
    np.testing.assert_allclose(table["time_s"], [31.5e-6, 12641e-6])


def test_nccl_tests_json(tmp_path):
    table = read_collectives([write(tmp_path, NCCL_JSON)], Placement("ours"))
    assert table[["workers", "nodes", "n_bytes"]].to_numpy().tolist() == [[2, 1, 1024], [2, 1, 4096]]
    np.testing.assert_allclose(table["time_s"], [31.5e-6, 40.25e-6])


def test_osu_text(tmp_path):
    table = read_collectives([write(tmp_path, OSU)], FOUR)
    assert table[["workers", "nodes", "n_bytes"]].to_numpy().tolist() == [[4, 2, 4], [4, 2, 1048576]]
    np.testing.assert_allclose(table["time_s"], [4.34e-6, 1234.56e-6])


def test_files_of_all_kinds_are_one_table_that_can_be_fitted(tmp_path):
    files = {"a.txt": NCCL, "b.json": NCCL_JSON, "c.csv": CSV}
    paths = [write(tmp_path, text, name) for name, text in files.items()]
    parts = [read_collectives([path], Placement("ours" if path.suffix != ".csv" else None)) for path in paths]
    assert [len(part) for part in parts] == [2, 2, 3]
    table = parts[0]
    for part in parts[1:]:
        checked = check_observed(part, COLLECTIVES)
        assert len(checked) == len(part)
    assert len(check_observed(table, COLLECTIVES)) == 2
    np.testing.assert_allclose(parts[2]["time_std_s"], [np.nan, 0, 2e-5])


BAD = {
    "empty": ("", "is empty"),
    "another text": ("hello\nworld\n", "column 'hello' is not known"),
    "no points": (NCCL[: NCCL.index("           0  ")], "has no measured point"),
    "a cut row": (NCCL.replace("12641    2.65    3.98      0", ""), "line 14: "),
    "no time": (NCCL.replace("31.50", "  nan"), "line 13: time = 'nan'"),
    "a point twice": (NCCL.replace("    33554432", "        1024"), "line 14: 1024 bytes of group ours"),
    "other workers": (NCCL, "has 4 workers, but --workers says 3"),
    "no JSON": ('{"results": [', "line 1: not valid JSON"),
    "no results": ({"results": 3}, "key 'results' is no list"),
    "a result that is none": ({"results": [3]}, "result 1 is no object"),
    "a result without time": ({"results": [{"size": 4, "in_place": {}}]}, "result's time = 'None'"),
    "OSU without table": (OSU[: OSU.index("# Size")], "has no table"),
    "OSU with two": (OSU + OSU.replace("Allreduce", "Reduce"), "after 'Allreduce Latency'"),
    "OSU zero": (OSU.replace("4.34", "0.00"), "line 6: latency = '0.00'"),
    "an unknown column": (CSV.replace("n_bytes", "size"), "column 'size' is not known"),
    "zero workers": (CSV.replace("a,8,2", "a,0,2"), "line 4: workers = '0'"),
    "half a byte": (CSV.replace("2000", "2000.5"), "line 3: n_bytes = '2000.5'"),
    "a negative time": (CSV.replace("0.001,", "-1,"), "line 2: time_s = '-1'"),
    "a negative deviation": (CSV.replace("2e-5", "-2e-5"), "line 4: time_std_s = '-2e-5'"),
    "too many fields": (CSV + "a,4,2,3000,1,1,1,1\n", "is no table"),
    "no rows": (CSV.splitlines()[0] + "\n", "has no rows"),
    "a repeated point": (CSV + "a,4,2,1000,0.002,\n", "line 5: 1000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_with_the_place(tmp_path, name):
    text, said = BAD[name]
    given = {"other workers": Placement("ours", 3), "OSU without table": FOUR}.get(name, Placement("ours"))
    if text and isinstance(text, str) and ("OSU" in name or text.startswith("group")):
        given = Placement("ours", 4, 2) if "OSU" in name else Placement()
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_collectives([path], given)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"), [(Placement("a", 4), "say --nodes"), (Placement("a", 0, 1), "--workers = 0: must be at least 1")]
)
def test_what_a_file_does_not_tell_must_be_said(tmp_path, given, said):
    with pytest.raises(InputError, match=said):
        read_collectives([write(tmp_path, OSU)], given)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([NCCL, json.dumps(NCCL_JSON), OSU, CSV]), st.binary(max_size=60), st.integers(0, 5000))
def test_no_damage_crashes_the_reader(tmp_path, whole, noise, place):
    content = whole.encode()
    place %= len(content)
    path = tmp_path / "damaged"
    path.write_bytes(content[:place] + noise + content[place + len(noise) :])
    said = ""
    try:
        read_collectives([path], FOUR)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


NUMBERS = st.text('0123456789.eE+-naif, "\n', max_size=30)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS, max_size=6))
def test_no_row_crashes_the_reader(tmp_path, rows):
    path = tmp_path / "rows.csv"
    path.write_text("n_bytes,time_s\n" + "\n".join(rows))
    said = ""
    try:
        table = read_collectives([path], FOUR)
        assert (table["n_bytes"] >= 1).all()
        assert np.isfinite(table["time_s"]).all()
    except InputError as error:
        said = str(error)
    assert "\n" not in said
