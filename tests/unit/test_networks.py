"""Networks: published parameter counts, operations counted by hand, Caffe's pooling, variants and their faults."""

import json
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime import networks
from steptime.core.errors import InputError
from steptime.core.network import Network
from steptime.frameworks import SETTINGS, child, installed_version
from steptime.networks import INPUT, Builder
from steptime.networks.builder import ceil_mode_padding, window_count
from steptime.networks.costs import matrix_products


def layer(network: Network, name: str):
    return next(layer for layer in network.layers if layer.name == name)


def multiply_adds(network: Network) -> float:
    """Of convolutions and dense layers, one sample's forward pass."""
    return sum(layer.forward_flops for layer in network.layers if layer.kind in ("conv", "dense")) / 2


# The network cut to one layer's worth of each new kind, for counting by hand: 3 steps, 8 features.
SEQUENCE = {"image": 3, "depth": 1, "width": 8 / 512, "classes": 5}

# Keras' mnist_mlp summary; Caffe's lenet, bvlc_alexnet and bvlc_googlenet (main branch); ResNet-50 of He et al.;
# VGG-16 and -19 as torchvision's documentation states them (table 2 of Simonyan & Zisserman: 138 and 144 million).
# Inception-v3: torchvision's 27,161,264, less the 3,326,696 of its auxiliary classifier.
PUBLISHED = {
    "mlp": 669_706,
    "lenet": 431_080,
    "alexnet": 60_965_224,
    "googlenet": 6_998_552,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "inception3": 27_161_264
    - (768 * 128 + 2 * 128 + 128 * 768 * 5 * 5 + 2 * 768 + 768 * 1000 + 1000),  # its 1 x 1, its 5 x 5, its classes
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name, parameters):
    network = networks.build(name, "full")
    assert network.parameter_count == parameters
    assert sum(np.prod(p.shape) for layer in network.layers for p in layer.parameters) == parameters


def test_parameters_by_hand_where_no_exact_count_is_published():
    full = {name: networks.build(name, "full").parameter_count for name in ("nin", "fcn5", "lstm", "transformer")}
    mlpconv = [(96, 3, 11), (256, 96, 5), (384, 256, 3), (1024, 384, 3)]
    last = [96, 256, 384, 1000]
    nin = sum(
        out * before * kernel**2 + out + out * out + out + out * end + end
        for (out, before, kernel), end in zip(mlpconv, last, strict=True)
    )
    assert full["nin"] == nin
    assert full["nin"] * 4 / 1e6 == pytest.approx(30.4, abs=0.05)  # MB: Iandola et al. 2015 (FireCaffe) say 30
    assert full["fcn5"] == 784 * 2048 + 2048 * 4096 + 4096 * 1024 + 1024 * 10 + 2048 + 4096 + 1024 + 10
    cell = 4 * 256 * (256 + 256 + 1)
    assert full["lstm"] == 10_000 * 256 + 2 * cell + 256 * 10_000 + 10_000
    # An encoder layer of the base Transformer has 3,152,384 parameters (torch.nn.TransformerEncoderLayer(512, 8)).
    assert full["transformer"] == 37_000 * 512 + 128 * 512 + 6 * 3_152_384 + 2 * 512 + 512 * 1000 + 1000


def test_a_published_count_that_does_not_hold():
    # dlbench's notes on FCN-5 say 13,707,264; that is the weights alone, and of 544 inputs: MNIST has 784.
    assert 544 * 2048 + 2048 * 4096 + 4096 * 1024 + 1024 * 10 == 13_707_264
    assert networks.build("fcn5", "full").parameter_count == 14_205_962


def test_alexnet_operations_by_hand():
    network = networks.build("alexnet", "full")
    by_hand = {  # output values x kernel area x channels seen by one group
        "conv1": 96 * 55 * 55 * 11 * 11 * 3,
        "conv2": 256 * 27 * 27 * 5 * 5 * 48,
        "conv3": 384 * 13 * 13 * 3 * 3 * 256,
        "conv4": 384 * 13 * 13 * 3 * 3 * 192,
        "conv5": 256 * 13 * 13 * 3 * 3 * 192,
        "fc6": 9216 * 4096,
        "fc7": 4096 * 4096,
        "fc8": 4096 * 1000,
    }
    for name, products in by_hand.items():
        assert layer(network, name).forward_flops == 2 * products, name
        assert layer(network, name).backward_flops == (1 if name == "conv1" else 2) * 2 * products, name
    assert sum(by_hand.values()) == 724_406_816  # the total that is quoted for bvlc_alexnet


def test_lenet_operations_by_hand():
    network = networks.build("lenet", "full")
    assert layer(network, "conv1").forward_flops == 2 * 20 * 24 * 24 * 25
    assert layer(network, "conv2").forward_flops == 2 * 50 * 8 * 8 * 25 * 20
    assert layer(network, "ip1").forward_flops == 2 * 800 * 500
    assert layer(network, "pool1").forward_flops == 20 * 12 * 12 * 4


def test_published_multiply_adds():
    # He et al. 2015, table 1: 3.8 x 10^9; Szegedy et al. 2014: a budget of 1.5 billion.
    assert multiply_adds(networks.build("resnet50", "full")) == pytest.approx(3.8e9, rel=0.02)
    assert multiply_adds(networks.build("googlenet", "full")) == pytest.approx(1.5e9, rel=0.07)
    # torchvision's documentation of the weights, "GFLOPS", by which it means multiply-adds.
    assert multiply_adds(networks.build("vgg16", "full")) == pytest.approx(15.47e9, abs=0.005e9)
    assert multiply_adds(networks.build("vgg19", "full")) == pytest.approx(19.63e9, abs=0.005e9)
    assert multiply_adds(networks.build("inception3", "full")) == pytest.approx(5.71e9, abs=0.005e9)


def test_element_wise_counts_as_stated():
    b = Builder((4, 6, 6))
    x = b.conv("conv", INPUT, 8, 3)  # 8 x 4 x 4 = 128 values
    b.batch_norm("bn", x)
    b.lrn("lrn", x, size=5)
    b.relu("relu", x)
    b.add("add", x, "bn", "lrn")
    b.global_avg_pool("mean", "add")
    stated = {"bn": (128 * 8, 128 * 16), "lrn": (128 * 13, 128 * 26), "relu": (128, 128), "add": (256, 0)}
    network = b.network("small", "quick")
    for name, (forward, backward) in stated.items():
        assert (layer(network, name).forward_flops, layer(network, name).backward_flops) == (forward, backward)
    assert layer(network, "mean").forward_flops == 128


def test_lstm_operations_by_hand():
    b = Builder((3,), vocabulary=7)
    b.lstm("second", b.lstm("first", b.embedding("embedding", INPUT, 2), 4), 5)
    b.dense("output", b.last("last", "second"), 6)
    network = b.network("small", "quick")
    assert [layer.forward_flops for layer in network.layers] == [
        0,
        2 * 3 * 16 * (2 + 4) + 20 * 3 * 4,  # steps x gates' values x (features + hidden)
        2 * 3 * 20 * (4 + 5) + 20 * 3 * 5,
        0,
        2 * 5 * 6,
    ]
    assert [layer.backward_flops for layer in network.layers] == [
        3 * 2,
        2 * 2 * 3 * 16 * (2 + 4) + 20 * 3 * 4,
        2 * 2 * 3 * 20 * (4 + 5) + 20 * 3 * 5,
        0,
        2 * 2 * 5 * 6,
    ]


def test_transformer_operations_by_hand():
    network = networks.build("transformer", **SEQUENCE)
    steps, features, heads = 3, 8, 8
    values, scores = steps * features, heads * steps * steps
    attention = 2 * steps * features * 4 * features + 2 * 2 * steps * steps * features
    hidden = 4 * values
    stated = {
        "embedding": (0, values),
        "position": (values, values),
        "block1_norm1": (8 * values, 16 * values),
        "block1_attention": (attention + 5 * scores, 2 * attention + 5 * scores),
        "block1_add1": (values, 0),
        "block1_norm2": (8 * values, 16 * values),
        "block1_fc1": (2 * hidden * features, 4 * hidden * features),
        "block1_gelu": (5 * hidden, 11 * hidden),
        "block1_fc2": (2 * hidden * features, 4 * hidden * features),
        "block1_add2": (values, 0),
        "norm": (8 * values, 16 * values),
        "mean": (values, values),
        "output": (2 * features * 5, 4 * features * 5),
    }
    assert {each.name: (each.forward_flops, each.backward_flops) for each in network.layers} == stated


def test_sigmoids_operations():
    sigmoid = layer(networks.build("fcn5", "full"), "sigmoid1")
    assert (sigmoid.forward_flops, sigmoid.backward_flops) == (4 * 2048, 3 * 2048)


def test_an_lstm_that_reads_the_input_itself_needs_no_gradient_of_it():
    b = Builder((3, 2))
    b.lstm("lstm", INPUT, 4)
    weights, hidden, pointwise = 2 * 3 * 16 * 2, 2 * 3 * 16 * 4, 20 * 3 * 4
    assert layer(b.network("small", "quick"), "lstm").backward_flops == weights + 2 * hidden + pointwise


# The matrix products of a whole step, as torch counts them: attention unfused, since the fused one recomputes.
COUNTED = """
import sys, json, importlib.util
import numpy as np
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
worker, adapter = load(sys.argv[1]), load(sys.argv[2])
for line in sys.stdin:
    network = json.loads(line)
    weights = worker.initial_weights(network, 1)
    trainer = adapter.build(network, weights, 2, 1, 0.1, 1, "cpu", "float32", "eager")
    images = np.zeros([2] + network["input_shape"], "int64" if network["vocabulary"] else "float32")
    print(json.dumps(trainer.flops(images, np.zeros(2, "int64"))))
"""


def test_matrix_products_are_those_that_torch_counts():
    described = [
        networks.build("vgg16", width=0.05, depth=1),
        networks.build("inception3", width=0.05),
        networks.build("nin", width=0.05, image=67),
        networks.build("fcn5", width=0.01),
        networks.build("transformer", width=0.05, image=5),
    ]
    setting = SETTINGS["torch"]
    if installed_version("torch") is None:
        pytest.skip("not installed: torch")
    command = [sys.executable, "-c", COUNTED, str(child.WORKER), str(setting.adapter)]
    lines = "\n".join(network.to_json() for network in described)
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=True)
    for network, answer in zip(described, done.stdout.splitlines(), strict=True):
        counted = json.loads(answer)
        products = [
            matrix_products(each.kind, each.settings, each.in_shapes, each.out_shape) for each in network.layers
        ]
        forward = sum(sum(product.values()) for product in products)
        assert counted["forward"] == forward, network.name
        # The first product needs no input gradient where its input are images; an embedding's tokens are no product.
        spared = 0 if network.vocabulary else next(sum(p.values()) for p in products if sum(p.values()))
        assert counted["backward"] == 2 * forward - spared, network.name


def test_nothing_before_the_first_parameters_has_a_backward():
    network = networks.build("mlp")
    assert layer(network, "flatten").backward_flops == 0
    assert layer(network, "fc1").backward_flops == layer(network, "fc1").forward_flops
    assert layer(network, "fc2").backward_flops == 2 * layer(network, "fc2").forward_flops


def test_published_shapes():
    alexnet, googlenet = networks.build("alexnet", "full"), networks.build("googlenet", "full")
    sides = {"conv1": 55, "pool1": 27, "conv2": 27, "pool2": 13, "conv5": 13, "pool5": 6}
    assert {name: layer(alexnet, name).out_shape[1] for name in sides} == sides
    shapes = {  # Szegedy et al. 2014, table 1
        "conv1": (64, 112, 112),
        "pool1": (64, 56, 56),
        "conv2": (192, 56, 56),
        "pool2": (192, 28, 28),
        "inception_3a_output": (256, 28, 28),
        "inception_3b_output": (480, 28, 28),
        "pool3": (480, 14, 14),
        "inception_4a_output": (512, 14, 14),
        "inception_4d_output": (528, 14, 14),
        "inception_4e_output": (832, 14, 14),
        "pool4": (832, 7, 7),
        "inception_5b_output": (1024, 7, 7),
    }
    assert {name: layer(googlenet, name).out_shape for name in shapes} == shapes
    assert layer(googlenet, "pool1").settings["pad"] == [0, 1, 0, 1]
    resnet = networks.build("resnet50", "full")
    stages = {"conv1": 112, "pool1": 56, "res2_3_add": 56, "res3_4_add": 28, "res4_6_add": 14, "res5_3_add": 7}
    assert {name: layer(resnet, name).out_shape[1] for name in stages} == stages
    assert layer(resnet, "res3_1_conv1").settings["stride"] == [2, 2]
    inception = networks.build("inception3", "full")
    shapes = {  # Szegedy et al. 2015, table 1
        "conv1": (32, 149, 149),
        "conv2": (32, 147, 147),
        "conv3": (64, 147, 147),
        "pool1": (64, 73, 73),
        "conv5": (192, 71, 71),
        "mixed5_3_output": (288, 35, 35),
        "mixed6_4_output": (768, 17, 17),
        "mixed7_0_output": (1280, 8, 8),
        "mixed7_2_output": (2048, 8, 8),
    }
    assert {name: layer(inception, name).out_shape for name in shapes} == shapes
    assert layer(inception, "mixed6_1_7x7_1").parameters[0].shape == (128, 128, 1, 7)
    assert layer(networks.build("vgg16", "full"), "pool5").out_shape == (512, 7, 7)
    assert layer(networks.build("nin", "full"), "cccp4_2").out_shape == (1000, 6, 6)


def test_sequences_have_steps_and_features():
    network = networks.build("transformer", **SEQUENCE)
    assert (network.input_shape, network.vocabulary, network.classes) == ((3,), 1000, 5)
    assert layer(network, "embedding").out_shape == (3, 8)
    assert layer(network, "block1_fc1").out_shape == (3, 32)
    assert layer(network, "mean").out_shape == (8,)
    assert layer(networks.build("lstm"), "last").out_shape == (128,)
    assert networks.build("lstm", "full").classes == networks.build("lstm", "full").vocabulary == 10_000
    assert all(networks.build(name).vocabulary == 0 for name in PUBLISHED)


lengths = st.integers(1, 40)
small = st.integers(1, 7)
pads = st.integers(0, 6)


@given(lengths, small, small, pads, pads)
def test_window_count_is_the_number_of_windows_that_fit(length, kernel, stride, before, after):
    fitting = [
        start for start in range(0, before + length + after, stride) if start + kernel <= before + length + after
    ]
    assert max(0, window_count(length, kernel, stride, before, after)) == len(fitting)


@given(lengths, small, small, pads)
def test_ceil_mode_padding_gives_caffes_windows(length, kernel, stride, pad):
    pad = min(pad, kernel - 1)
    if length + 2 * pad < kernel:
        return
    # Windows are added until they reach the end of the padded input, and one that starts past the input is dropped.
    windows = next(n for n in count(1) if (n - 1) * stride + kernel >= length + 2 * pad)
    if (windows - 1) * stride >= length + pad:
        windows -= 1
    before, after = ceil_mode_padding(length, kernel, stride, pad)
    assert before == pad
    assert window_count(length, kernel, stride, before, after) == windows
    assert after == 0 or window_count(length, kernel, stride, before, after - 1) == windows - 1


@pytest.mark.parametrize("name", networks.NAMES)
@pytest.mark.parametrize("size", networks.SIZES)
def test_json_round_trip(name, size):
    network = networks.build(name, size)
    assert Network.from_json(network.to_json()) == network


@pytest.mark.parametrize("name", networks.NAMES)
def test_layers_are_in_execution_order_and_shapes_join(name):
    shapes = {INPUT: networks.build(name).input_shape}
    for each in networks.build(name).layers:
        assert each.in_shapes == tuple(shapes[source] for source in each.inputs), each.name
        assert each.name not in shapes
        shapes[each.name] = each.out_shape


def test_quick_is_smaller_where_the_published_network_is_large():
    for name in ("alexnet", "googlenet", "resnet50", "vgg16", "vgg19", "inception3", "nin", "transformer"):
        assert networks.build(name).forward_flops < networks.build(name, "full").forward_flops / 50


def test_variants_change_what_they_say():
    assert layer(networks.build("alexnet", "full", width=0.5), "conv1").out_shape == (48, 55, 55)
    assert networks.build("alexnet", width=0.01).parameter_count > 0
    assert networks.build("resnet50", "full", depth=1).parameter_count < PUBLISHED["resnet50"]
    assert networks.build("googlenet", classes=7).classes == 7
    assert networks.build("lenet", image=32).input_shape == (1, 32, 32)
    hidden = [layer for layer in networks.build("mlp", depth=4).layers if layer.kind == "dense"]
    assert len(hidden) == 5
    assert [each.kind for each in networks.build("alexnet", depth=5).layers].count("conv") == 7


BAD = [
    ("vgg", {}, "vgg"),
    ("mlp", {"size": "huge"}, "huge"),
    ("mlp", {"colour": 3}, "colour"),
    ("mlp", {"width": 0}, "width"),
    ("mlp", {"width": -1.5}, "width"),
    ("mlp", {"width": float("nan")}, "width"),
    ("mlp", {"width": "2"}, "width"),
    ("mlp", {"depth": 0}, "depth"),
    ("mlp", {"depth": 1.5}, "depth"),
    ("mlp", {"depth": True}, "depth"),
    ("resnet50", {"depth": 7}, "depth"),
    ("vgg16", {"depth": 4}, "depth"),
    ("fcn5", {"depth": 4}, "depth"),
    ("inception3", {"image": 74}, "mixed7_0"),
    ("transformer", {"vocabulary": 5}, "vocabulary"),
    ("googlenet", {"classes": -10}, "classes"),
    ("googlenet", {"image": 0}, "image"),
    ("alexnet", {"image": 10}, "conv1"),
    ("lenet", {"image": None}, "image"),
]


@pytest.mark.parametrize(("name", "settings", "named"), BAD)
def test_bad_values_are_one_line_that_names_them(name, settings, named):
    with pytest.raises(InputError, match=named) as caught:
        networks.build(name, **settings)
    assert "\n" not in str(caught.value)


def test_layers_that_do_not_join_are_refused():
    b = Builder((4, 8, 8))
    b.conv("wide", INPUT, 6, 3)
    with pytest.raises(InputError, match="groups"):
        b.conv("odd", INPUT, 6, 3, groups=4)
    with pytest.raises(InputError, match="add"):
        b.add("sum", INPUT, "wide")
    with pytest.raises(InputError, match="join"):
        b.concat("join", INPUT, "wide")
    with pytest.raises(InputError, match="uneven: 6 features do not divide into 4 heads"):
        Builder((3, 6)).attention("uneven", INPUT, 4)


def test_bytes():
    conv1 = layer(networks.build("alexnet", "full"), "conv1")
    assert networks.parameter_bytes(conv1) == 4 * (96 * 3 * 11 * 11 + 96)
    assert networks.activation_bytes(conv1, batch=8, dtype="float16") == 2 * 8 * 96 * 55 * 55
    with pytest.raises(InputError, match="int3"):
        networks.parameter_bytes(conv1, "int3")
