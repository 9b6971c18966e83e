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
    """`width` multiplies every channel and hidden feature count; `image` is the input's side, and of a sequence its
    steps; `vocabulary` belongs to the size, 0 for images. `depth` by network:

    mlp: hidden layers. lenet: hidden dense layers. alexnet: 3 x 3 convolutions. nin: 1 x 1 convolutions after each
    larger one. lstm: LSTM layers. transformer: blocks. At most so many in a stage: googlenet, inception3: inception
    modules; resnet50: residual blocks; vgg16, vgg19: convolutions. fcn5: hidden layers, at most so many.
    """

    width: float
    depth: int
    image: int
    classes: int
    vocabulary: int = 0

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


def _vgg(variant: Variant, convolutions: tuple[int, ...]) -> Builder:
    """VGG (Simonyan & Zisserman 2014, table 1) with so many convolutions a stage; dropout of section 3.1."""
    b = Builder((3, variant.image, variant.image))
    x = INPUT
    for stage, (count, channels) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True), start=1):
        for number in range(1, min(count, variant.depth) + 1):
            x = b.conv(f"conv{stage}_{number}", x, variant.channels(channels), 3, pad=1)
            x = b.relu(f"relu{stage}_{number}", x)
        x = b.max_pool(f"pool{stage}", x, 2, stride=2)
    x = b.flatten("flatten", x)
    for number in (6, 7):
        x = b.dense(f"fc{number}", x, variant.channels(4096))
        x = b.relu(f"relu{number}", x)
        x = b.dropout(f"drop{number}", x, 0.5)
    b.dense("fc8", x, variant.classes)
    return b


def vgg16(variant: Variant) -> Builder:
    """VGG-16, configuration D."""
    return _vgg(variant, (2, 2, 3, 3, 3))


def vgg19(variant: Variant) -> Builder:
    """VGG-19, configuration E."""
    return _vgg(variant, (2, 2, 4, 4, 4))


def nin(variant: Variant) -> Builder:
    """Network in Network (Lin, Chen & Yan 2013) for ImageNet, as its authors' `nin_imagenet` in Caffe's model zoo.

    The last 1 x 1 convolution has a channel a class, and a ReLU, too; their mean is the output.
    """
    b = Builder((3, variant.image, variant.image))

    def block(number: int, source: str, channels: int, kernel: int, last: bool = False, **settings: Any) -> str:
        x = b.conv(f"conv{number}", source, variant.channels(channels), kernel, **settings)
        x = b.relu(f"relu{number}", x)
        for inner in range(1, variant.depth + 1):
            out = variant.classes if last and inner == variant.depth else variant.channels(channels)
            x = b.relu(f"cccp{number}_{inner}_relu", b.conv(f"cccp{number}_{inner}", x, out, 1))
        return x

    x = b.caffe_max_pool("pool1", block(1, INPUT, 96, 11, stride=4), 3, stride=2)
    x = b.caffe_max_pool("pool2", block(2, x, 256, 5, pad=2), 3, stride=2)
    x = b.caffe_max_pool("pool3", block(3, x, 384, 3, pad=1), 3, stride=2)
    x = b.dropout("drop", x, 0.5)
    b.global_avg_pool("pool4", block(4, x, 1024, 3, last=True, pad=1))
    return b


def inception3(variant: Variant) -> Builder:
    """Inception-v3 (Szegedy et al. 2015, "Rethinking the Inception Architecture", table 1), no auxiliary classifier.

    What the paper's figures leave open (channels within modules, batch norm with a scale after each convolution,
    padding counted in averages) is as in torchvision's `inception_v3`.
    """
    b = Builder((3, variant.image, variant.image))

    def conv(name: str, source: str, channels: int, kernel: int | tuple[int, int], **settings: Any) -> str:
        """Convolution, batch norm and ReLU; an elongated kernel keeps the height and width."""
        if isinstance(kernel, tuple):
            high, wide = (side // 2 for side in kernel)
            settings["pad"] = (high, high, wide, wide)
        x = b.conv(name, source, variant.channels(channels), kernel, bias=False, **settings)
        return b.relu(f"{name}_relu", b.batch_norm(f"{name}_bn", x, 1e-3))

    def pooled(name: str, source: str, channels: int) -> str:
        return conv(f"{name}_pool_proj", b.avg_pool(f"{name}_pool", source, 3, pad=1), channels, 1)

    def module_a(name: str, source: str, projection: int) -> str:
        """Figure 5 of the paper, one 5 x 5 kept."""
        five = conv(f"{name}_5x5", conv(f"{name}_5x5_reduce", source, 48, 1), 64, 5, pad=2)
        three = conv(f"{name}_3x3_1", conv(f"{name}_3x3_reduce", source, 64, 1), 96, 3, pad=1)
        three = conv(f"{name}_3x3_2", three, 96, 3, pad=1)
        one = conv(f"{name}_1x1", source, 64, 1)
        return b.concat(f"{name}_output", one, five, three, pooled(name, source, projection))

    def reduction_b(name: str, source: str) -> str:
        """Figure 10: half the height and width."""
        double = conv(f"{name}_double_1", conv(f"{name}_double_reduce", source, 64, 1), 96, 3, pad=1)
        double = conv(f"{name}_double_2", double, 96, 3, stride=2)
        single = conv(f"{name}_3x3", source, 384, 3, stride=2)
        return b.concat(f"{name}_output", single, double, b.max_pool(f"{name}_pool", source, 3, stride=2))

    def module_c(name: str, source: str, inner: int) -> str:
        """Figure 6 with n = 7."""
        seven = conv(f"{name}_7x7_reduce", source, inner, 1)
        seven = conv(f"{name}_7x7_2", conv(f"{name}_7x7_1", seven, inner, (1, 7)), 192, (7, 1))
        double = conv(f"{name}_double_reduce", source, inner, 1)
        for number, kernel in enumerate(((7, 1), (1, 7), (7, 1)), start=1):
            double = conv(f"{name}_double_{number}", double, inner, kernel)
        double = conv(f"{name}_double_4", double, 192, (1, 7))
        one = conv(f"{name}_1x1", source, 192, 1)
        return b.concat(f"{name}_output", one, seven, double, pooled(name, source, 192))

    def reduction_d(name: str, source: str) -> str:
        three = conv(f"{name}_3x3", conv(f"{name}_3x3_reduce", source, 192, 1), 320, 3, stride=2)
        seven = conv(f"{name}_7x7_reduce", source, 192, 1)
        seven = conv(f"{name}_7x7_2", conv(f"{name}_7x7_1", seven, 192, (1, 7)), 192, (7, 1))
        seven = conv(f"{name}_7x7_3", seven, 192, 3, stride=2)
        return b.concat(f"{name}_output", three, seven, b.max_pool(f"{name}_pool", source, 3, stride=2))

    def module_e(name: str, source: str) -> str:
        """Figure 7: 1 x 3 and 3 x 1 side by side."""
        three = conv(f"{name}_3x3_reduce", source, 384, 1)
        double = conv(f"{name}_double", conv(f"{name}_double_reduce", source, 448, 1), 384, 3, pad=1)
        branches = [conv(f"{name}_1x1", source, 320, 1)]
        for branch, x in (("3x3", three), ("double", double)):
            branches += [conv(f"{name}_{branch}_{n}", x, 384, kernel) for n, kernel in ((1, (1, 3)), (2, (3, 1)))]
        return b.concat(f"{name}_output", *branches, pooled(name, source, 192))

    x = conv("conv1", INPUT, 32, 3, stride=2)
    x = conv("conv2", x, 32, 3)
    x = conv("conv3", x, 64, 3, pad=1)
    x = b.max_pool("pool1", x, 3, stride=2)
    x = conv("conv4", x, 80, 1)
    x = conv("conv5", x, 192, 3)
    x = b.max_pool("pool2", x, 3, stride=2)
    for number, projection in enumerate((32, 64, 64)[: variant.depth], start=1):
        x = module_a(f"mixed5_{number}", x, projection)
    x = reduction_b("mixed6_0", x)
    for number, inner in enumerate((128, 160, 160, 192)[: variant.depth], start=1):
        x = module_c(f"mixed6_{number}", x, inner)
    x = reduction_d("mixed7_0", x)
    for number in range(1, min(2, variant.depth) + 1):
        x = module_e(f"mixed7_{number}", x)
    x = b.global_avg_pool("pool3", x)
    x = b.dropout("drop", x, 0.5)
    b.dense("fc", x, variant.classes)
    return b


def fcn5(variant: Variant) -> Builder:
    """FCN-5 of dlbench (Shi et al. 2016): 784-2048-4096-1024-10 with sigmoids, as in its `tools/caffe/fc`.

    Its notes say 13,707,264 parameters; the scripts' layers have 14,205,962.
    """
    b = Builder((1, variant.image, variant.image))
    x = b.flatten("flatten", INPUT)
    for number, features in enumerate((2048, 4096, 1024)[: variant.depth], start=1):
        x = b.dense(f"fc{number}", x, variant.channels(features))
        x = b.sigmoid(f"sigmoid{number}", x)
    b.dense("output", x, variant.classes)
    return b


def lstm(variant: Variant) -> Builder:
    """The LSTM of dlbench (Shi et al. 2016; its `tools/tensorflow/rnn/lstm`), after Zaremba et al. 2014, small.

    Two layers of 256 over 32 words of a vocabulary of 10,000, no dropout. Here only the last step predicts a word, so
    that a sample has one label.
    """
    b = Builder((variant.image,), variant.vocabulary)
    x = b.embedding("embedding", INPUT, variant.channels(256))
    for number in range(1, variant.depth + 1):
        x = b.lstm(f"lstm{number}", x, variant.channels(256))
    b.dense("output", b.last("last", x), variant.classes)
    return b


def transformer(variant: Variant) -> Builder:
    """The base Transformer's encoder (Vaswani et al. 2017, table 3) as a classifier of sequences.

    Learned positions (row E of the table), the mean over steps, layer norm before each part instead of after and once
    at the end (Xiong et al. 2020, table 1), GELU instead of ReLU, no dropout. The vocabulary is the paper's 37,000.
    """
    b = Builder((variant.image,), variant.vocabulary)
    features, heads = variant.channels(512, 8), 8
    x = b.position("position", b.embedding("embedding", INPUT, features))
    for number in range(1, variant.depth + 1):
        name = f"block{number}"
        y = b.attention(f"{name}_attention", b.layer_norm(f"{name}_norm1", x), heads)
        x = b.add(f"{name}_add1", x, y)
        y = b.token_dense(f"{name}_fc1", b.layer_norm(f"{name}_norm2", x), 4 * features)
        y = b.token_dense(f"{name}_fc2", b.gelu(f"{name}_gelu", y), features)
        x = b.add(f"{name}_add2", x, y)
    x = b.layer_norm("norm", x)
    b.dense("output", b.mean_steps("mean", x), variant.classes)
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
    "vgg16": _Entry(vgg16, Variant(0.25, 3, 32, 10), Variant(1, 3, 224, 1000), deepest=3),
    "vgg19": _Entry(vgg19, Variant(0.25, 4, 32, 10), Variant(1, 4, 224, 1000), deepest=4),
    "inception3": _Entry(inception3, Variant(0.25, 1, 75, 10), Variant(1, 4, 299, 1000), deepest=4),
    "nin": _Entry(nin, Variant(0.25, 2, 99, 10), Variant(1, 2, 224, 1000)),
    "fcn5": _Entry(fcn5, Variant(0.5, 3, 28, 10), Variant(1, 3, 28, 10), deepest=3),
    "lstm": _Entry(lstm, Variant(0.5, 2, 16, 10, 1000), Variant(1, 2, 32, 10000, 10000)),
    "transformer": _Entry(transformer, Variant(0.25, 2, 32, 10, 1000), Variant(1, 6, 128, 1000, 37000)),
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
    known = [field.name for field in fields(Variant) if field.name != "vocabulary"]
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
