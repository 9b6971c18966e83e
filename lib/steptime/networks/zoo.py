"""The networks: what is in them, their published and quick sizes, and the variants that are allowed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from steptime.core.errors import InputError
from steptime.core.network import Network
from steptime.networks.builder import INPUT, Builder


@dataclass(frozen=True)
class Variant:
    """`width` multiplies every channel and hidden feature count; `image` is the input's side; `depth` by network:

    mlp: hidden layers. lenet: hidden dense layers. alexnet: 3 x 3 convolutions. googlenet: inception modules, and
    resnet50: residual blocks, at most so many in a stage.
    """

    width: float
    depth: int
    image: int
    classes: int

    def channels(self, count: int, multiple: int = 1) -> int:
        """`count` scaled by the width, to a multiple of `multiple`."""
        return max(1, round(count * self.width / multiple)) * multiple


SIZES = ("quick", "full")


def mlp(variant: Variant) -> Builder:
    """Multi-layer perceptron 784-512-512-10 with dropout, the MNIST example of Keras (`mnist_mlp.py`)."""
    b = Builder((1, variant.image, variant.image))
    x = b.flatten("flatten", INPUT)
    for number in range(1, variant.depth + 1):
        x = b.dense(f"fc{number}", x, variant.channels(512))
        x = b.relu(f"relu{number}", x)
        x = b.dropout(f"drop{number}", x, 0.2)
    b.dense(f"fc{variant.depth + 1}", x, variant.classes)
    return b


def lenet(variant: Variant) -> Builder:
    """LeNet as in Caffe's MNIST example (`examples/mnist/lenet_train_test.prototxt`)."""
    b = Builder((1, variant.image, variant.image))
    x = b.conv("conv1", INPUT, variant.channels(20), 5)
    x = b.caffe_max_pool("pool1", x, 2, stride=2)
    x = b.conv("conv2", x, variant.channels(50), 5)
    x = b.caffe_max_pool("pool2", x, 2, stride=2)
    x = b.flatten("flatten", x)
    for number in range(1, variant.depth + 1):
        x = b.dense(f"ip{number}", x, variant.channels(500))
        x = b.relu(f"relu{number}", x)
    b.dense(f"ip{variant.depth + 1}", x, variant.classes)
    return b


def alexnet(variant: Variant) -> Builder:
    """AlexNet (Krizhevsky, Sutskever & Hinton 2012) as in Caffe's `models/bvlc_alexnet`: groups and LRN."""
    b = Builder((3, variant.image, variant.image))

    def conv(number: int, source: str, channels: int, kernel: int, **settings: Any) -> str:
        name = b.conv(f"conv{number}", source, variant.channels(channels, 2), kernel, **settings)
        return b.relu(f"relu{number}", name)

    x = conv(1, INPUT, 96, 11, stride=4)
    x = b.lrn("norm1", x)
    x = b.caffe_max_pool("pool1", x, 3, stride=2)
    x = conv(2, x, 256, 5, pad=2, groups=2)
    x = b.lrn("norm2", x)
    x = b.caffe_max_pool("pool2", x, 3, stride=2)
    last = 2 + variant.depth
    for number in range(3, last + 1):
        x = conv(number, x, 256 if number == last else 384, 3, pad=1, groups=1 if number == 3 else 2)
    x = b.caffe_max_pool(f"pool{last}", x, 3, stride=2)
    x = b.flatten("flatten", x)
    for number in (last + 1, last + 2):
        x = b.dense(f"fc{number}", x, variant.channels(4096))
        x = b.relu(f"relu{number}", x)
        x = b.dropout(f"drop{number}", x, 0.5)
    b.dense(f"fc{last + 3}", x, variant.classes)
    return b


INCEPTIONS = {
    # 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection: table 1 of the paper
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(variant: Variant) -> Builder:
    """GoogLeNet (Szegedy et al. 2014) as in Caffe's `models/bvlc_googlenet`, without the auxiliary classifiers."""
    b = Builder((3, variant.image, variant.image))

    def conv(name: str, source: str, channels: int, kernel: int, **settings: Any) -> str:
        return b.relu(f"{name}_relu", b.conv(name, source, variant.channels(channels), kernel, **settings))

    def inception(stage: str, source: str) -> str:
        name = f"inception_{stage}"
        one, reduce3, three, reduce5, five, projection = INCEPTIONS[stage]
        branches = (
            conv(f"{name}_1x1", source, one, 1),
            conv(f"{name}_3x3", conv(f"{name}_3x3_reduce", source, reduce3, 1), three, 3, pad=1),
            conv(f"{name}_5x5", conv(f"{name}_5x5_reduce", source, reduce5, 1), five, 5, pad=2),
            conv(f"{name}_pool_proj", b.caffe_max_pool(f"{name}_pool", source, 3, stride=1, pad=1), projection, 1),
        )
        return b.concat(f"{name}_output", *branches)

    x = conv("conv1", INPUT, 64, 7, stride=2, pad=3)
    x = b.caffe_max_pool("pool1", x, 3, stride=2)
    x = b.lrn("norm1", x)
    x = conv("conv2", conv("conv2_reduce", x, 64, 1), 192, 3, pad=1)
    x = b.lrn("norm2", x)
    x = b.caffe_max_pool("pool2", x, 3, stride=2)
    for stage in "345":
        if stage != "3":
            x = b.caffe_max_pool(f"pool{int(stage) - 1}", x, 3, stride=2)
        for name in [name for name in INCEPTIONS if name.startswith(stage)][: variant.depth]:
            x = inception(name, x)
    x = b.global_avg_pool("pool5", x)
    x = b.dropout("drop", x, 0.4)
    b.dense("classifier", x, variant.classes)
    return b


def resnet50(variant: Variant) -> Builder:
    """ResNet-50 (He et al. 2015, table 1): the stride is in a stage's first 1 x 1 convolution; Caffe's pooling."""
    b = Builder((3, variant.image, variant.image))

    def conv(name: str, source: str, channels: int, kernel: int, **settings: Any) -> str:
        name_ = b.conv(name, source, variant.channels(channels), kernel, bias=False, **settings)
        return b.batch_norm(f"{name}_bn", name_)

    def block(name: str, source: str, channels: int, stride: int, first: bool) -> str:
        y = b.relu(f"{name}_relu1", conv(f"{name}_conv1", source, channels, 1, stride=stride))
        y = b.relu(f"{name}_relu2", conv(f"{name}_conv2", y, channels, 3, pad=1))
        y = conv(f"{name}_conv3", y, 4 * channels, 1)
        shortcut = conv(f"{name}_shortcut", source, 4 * channels, 1, stride=stride) if first else source
        return b.relu(f"{name}_relu3", b.add(f"{name}_add", shortcut, y))

    x = b.relu("conv1_relu", conv("conv1", INPUT, 64, 7, stride=2, pad=3))
    x = b.caffe_max_pool("pool1", x, 3, stride=2)
    for stage, blocks in enumerate((3, 4, 6, 3), start=2):
        for number in range(1, min(blocks, variant.depth) + 1):
            stride = 2 if stage > 2 and number == 1 else 1
            x = block(f"res{stage}_{number}", x, 64 * 2 ** (stage - 2), stride, number == 1)
    x = b.global_avg_pool("pool5", x)
    b.dense("fc", x, variant.classes)
    return b


@dataclass(frozen=True)
class _Entry:
    make: Callable[[Variant], Builder]
    quick: Variant
    full: Variant
    deepest: int | None = None


_ZOO = {
    "mlp": _Entry(mlp, Variant(1, 2, 28, 10), Variant(1, 2, 28, 10)),
    "lenet": _Entry(lenet, Variant(1, 1, 28, 10), Variant(1, 1, 28, 10)),
    "alexnet": _Entry(alexnet, Variant(0.25, 3, 67, 10), Variant(1, 3, 227, 1000)),
    "googlenet": _Entry(googlenet, Variant(0.25, 2, 48, 10), Variant(1, 5, 224, 1000), deepest=5),
    "resnet50": _Entry(resnet50, Variant(0.25, 2, 32, 10), Variant(1, 6, 224, 1000), deepest=6),
}

NAMES = tuple(_ZOO)


def build(name: str, size: str = "quick", **variant: Any) -> Network:
    """The network `name` in a preset `size` ("quick" or "full"), changed by width, depth, image, classes.

    Raises InputError, one line, for an unknown name, size or variant, and for a value that is not allowed.
    """
    if name not in _ZOO:
        raise InputError(f"network = {name!r}: unknown; known: {', '.join(NAMES)}")
    if size not in SIZES:
        raise InputError(f"size = {size!r}: unknown; known: {', '.join(SIZES)}")
    entry = _ZOO[name]
    known = [field.name for field in fields(Variant)]
    for key, value in variant.items():
        if key not in known:
            raise InputError(f"network {name}: unknown variant {key!r}; known: {', '.join(known)}")
        _check(name, key, value, entry.deepest)
    chosen = replace(entry.quick if size == "quick" else entry.full, **variant)
    try:
        return entry.make(chosen).network(name, size)
    except InputError as error:
        raise InputError(f"network {name}: {error}") from None


def _check(name: str, key: str, value: Any, deepest: int | None) -> None:
    where = f"network {name}: {key} = {value!r}"
    number, what = (float | Integral, "number") if key == "width" else (Integral, "whole number")
    if isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: must be a {what} above 0")
    if key == "depth" and deepest is not None and int(value) > deepest:
        raise InputError(f"{where}: must be at most {deepest}, the depth of the published network")
