"""Layer-profile graphs: order, sums, inputs, cycles and other faults."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.traces.layer_graphs import COLUMNS, read_layer_graphs

HEAD = ",".join(COLUMNS) + "\n"
GRAPH = HEAD + (
    "net,0,sum,Add,0.001,0.002,40,0,left right\n"
    'net,1,left,"Conv2d(3, 8)",0.010,0.020,80,864,data\n'
    "net,2,right,Linear,0.030,0.040,160,400,data\n"
    "net,3,data,Input,0.5,0,1000,0,\n"
    "other,0,only,Linear,1,2,3,4,\n"
)


def write(tmp_path, text):
    path = tmp_path / "layers.csv"
    path.write_text(text)
    return path


def test_layers_come_after_their_inputs_and_data_are_no_layer(tmp_path):
    found = read_layer_graphs(write(tmp_path, GRAPH), batch=64)
    assert list(found) == ["net", "other"]
    profile = found["net"]
    assert profile.layers == ("left", "right", "sum")
    assert profile.batch == 64
    assert profile.t_io_s == 0.5
    assert (profile.t_f_s, profile.t_b_s) == pytest.approx((0.041, 0.062))
    assert profile.parameter_bytes.tolist() == [864, 400, 0]
    assert profile.activation_bytes.tolist() == [80, 160, 40]


BAD = {
    "a cycle": (GRAPH.replace("80,864,data", "80,864,sum"), "line 2: layer 'sum' of net is in a cycle (sum <- left)"),
    "itself": (GRAPH.replace("80,864,data", "80,864,left"), "layer 'left' of net is in a cycle (left)"),
    "an unknown input": (GRAPH.replace("left right", "left up"), "line 2: inputs of 'sum': 'up' is no layer of net"),
    "another network's": (GRAPH.replace("left right", "only"), "'only' is no layer of net"),
    "a layer twice": (GRAPH.replace("net,2,right", "net,2,left"), "line 4: layer 'left' of net is there twice"),
    "NaN": (GRAPH.replace("0.020", "nan"), "line 3: backward_s = 'nan'"),
    "negative": (GRAPH.replace("160,400", "-1,400"), "line 4: activation_bytes = '-1'"),
    "text": (GRAPH.replace("864", "many"), "line 3: parameter_bytes = 'many'"),
    "a wrong column": (GRAPH.replace("forward_s", "fwd"), "column 'fwd' is not known"),
    "a missing column": ("network,index\nnet,0\n", "a column is missing"),
    "no rows": (HEAD, "has no rows"),
    "empty": ("", "is no table"),
    "no name": (GRAPH.replace("net,0,sum", "net,0,"), "line 2: network or layer is empty"),
    "inputs only": (HEAD + "net,0,data,Input,1,0,0,0,\n", "has inputs only"),
    "too many fields": (GRAPH + "a,b,c,d,e,f,g,h,i,j\n", "is no table"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_graph_is_one_line_with_the_place(tmp_path, name):
    text, said = BAD[name]
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_layer_graphs(path, batch=1)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_batch_of_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="batch = 0"):
        read_layer_graphs(write(tmp_path, GRAPH), batch=0)


EDGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EDGES)
def test_any_graph_is_ordered_or_its_cycle_is_named(tmp_path, edges):
    inputs = {node: sorted({source for source, target in edges if target == node}) for node in range(8)}
    rows = [f"net,{node},n{node},Linear,1,1,1,1,{' '.join(f'n{source}' for source in inputs[node])}" for node in inputs]
    path = write(tmp_path, HEAD + "\n".join(rows) + "\n")
    try:
        layers = read_layer_graphs(path, batch=1)["net"].layers
    except InputError as error:
        chain = str(error).partition("cycle (")[2].partition(")")[0].removesuffix(" …").split(" <- ")
        nodes = [int(name[1:]) for name in chain]
        assert all(source in inputs[node] for node, source in pairwise(nodes))
        assert len(nodes) == 6 or nodes[0] in inputs[nodes[-1]]
        return
    assert len(layers) == 8
    place = {name: number for number, name in enumerate(layers)}
    assert all(place[f"n{source}"] < place[f"n{node}"] for node in inputs for source in inputs[node])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.integers(0, 5000))
def test_no_damage_crashes_the_reader(tmp_path, noise, place):
    content = GRAPH.encode()
    place %= len(content)
    path = tmp_path / "damaged.csv"
    path.write_bytes(content[:place] + noise + content[place + len(noise) :])
    said = ""
    try:
        read_layer_graphs(path, batch=1)
    except InputError as error:
        said = str(error)
    assert "\n" not in said
