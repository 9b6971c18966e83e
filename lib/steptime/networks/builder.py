"""Puts layers together and infers their shapes, without the batch.

They are (channels, height, width) of images, (steps, features) of sequences, (features,) of flat layers.
"""

from typing import Any

from steptime.core.errors import InputError
from steptime.core.network import KINDS, Layer, Network, Parameter
from steptime.networks.costs import backward_flops, forward_flops

INPUT = "input"
"""The name by which a layer refers to the network's input."""

Shape = tuple[int, ...]
Kernel = int | tuple[int, int]
Pad = int | tuple[int, int, int, int]


def window_count(length: int, kernel: int, stride: int, before: int, after: int) -> int:
    """Windows of `kernel` that lie wholly inside `before + length + after` values, `stride` apart."""
    return (before + length + after - kernel) // stride + 1


def ceil_mode_padding(length: int, kernel: int, stride: int, pad: int) -> tuple[int, int]:
    """Padding (before, after) that makes a plain pooling give what Caffe's pooling gives.

    Caffe rounds the number of windows up and drops a last window that would start in the padding
    (`pooling_layer.cpp`, PoolingLayer::Reshape); without padding, where it keeps a last window that starts past the
    input and is empty, it is dropped here, too. The padding after can be less than `pad` or more.
    """
    windows = -(-(length + 2 * pad - kernel) // stride) + 1
    if (windows - 1) * stride >= length + pad:
        windows -= 1
    return pad, max(0, (windows - 1) * stride + kernel - length - pad)


class Builder:
    """Collects layers in execution order. Every method adds one layer, fed by `source`, and returns its name.

    With a `vocabulary` the input is tokens, `input_shape` = (steps,). A kernel that does not fit raises InputError
    naming the layer.
    """

    def __init__(self, input_shape: Shape, vocabulary: int = 0) -> None:
        self.input_shape = input_shape
        self.vocabulary = vocabulary
        self.layers: list[Layer] = []
        self.shapes: dict[str, Shape] = {INPUT: input_shape}
        self._trained: dict[str, bool] = {INPUT: False}

    def conv(
        self,
        name: str,
        source: str,
        out_channels: int,
        kernel: Kernel,
        *,
        stride: int = 1,
        pad: Pad = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> str:
        """Convolution of a square or (height, width) kernel; `groups` of channels do not see each other."""
        channels = self.shapes[source][0]
        if channels % groups or out_channels % groups:
            raise InputError(f"{name}: {channels} channels to {out_channels} do not divide into {groups} groups")
        settings = _window(kernel, stride, pad) | {"out_channels": out_channels, "groups": groups, "bias": bias}
        shape = (out_channels, *self._windows(name, source, settings))
        weight = Parameter(f"{name}/weight", (out_channels, channels // groups, *settings["kernel"]))
        return self._append(name, "conv", (source,), shape, settings, (weight, *_bias(name, out_channels, bias)))

    def dense(self, name: str, source: str, features: int, *, bias: bool = True) -> str:
        """Matrix product with every feature of a flat input."""
        return self._dense(name, "dense", source, features, bias)

    def max_pool(self, name: str, source: str, kernel: int, *, stride: int = 1, pad: Pad = 0) -> str:
        """Largest value of each window; padding never wins (it counts as minus infinity)."""
        return self._pool(name, "max_pool", source, _window(kernel, stride, pad))

    def avg_pool(self, name: str, source: str, kernel: int, *, stride: int = 1, pad: Pad = 0) -> str:
        """Sum of each window over the kernel's area; padding counts as zeros."""
        return self._pool(name, "avg_pool", source, _window(kernel, stride, pad))

    def caffe_max_pool(self, name: str, source: str, kernel: int, *, stride: int, pad: int = 0) -> str:
        """Max pooling with Caffe's rounding up, as explicit padding."""
        _, height, width = self.shapes[source]
        top, bottom = ceil_mode_padding(height, kernel, stride, pad)
        left, right = ceil_mode_padding(width, kernel, stride, pad)
        return self.max_pool(name, source, kernel, stride=stride, pad=(top, bottom, left, right))

    def global_avg_pool(self, name: str, source: str) -> str:
        """Mean of each channel, as a flat vector."""
        return self._append(name, "global_avg_pool", (source,), self.shapes[source][:1], {})

    def lrn(self, name: str, source: str, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1) -> str:
        """Local response normalisation across `size` channels (Krizhevsky 2012, section 3.3; constants of Caffe)."""
        settings = {"size": size, "alpha": alpha, "beta": beta, "k": k}
        return self._append(name, "lrn", (source,), self.shapes[source], settings)

    def batch_norm(self, name: str, source: str, epsilon: float = 1e-5) -> str:
        """Batch normalisation with the batch's own statistics (Ioffe & Szegedy 2015, algorithm 1)."""
        channels = self.shapes[source][0]
        parameters = (Parameter(f"{name}/scale", (channels,)), Parameter(f"{name}/shift", (channels,)))
        return self._append(name, "batch_norm", (source,), self.shapes[source], {"epsilon": epsilon}, parameters)

    def relu(self, name: str, source: str) -> str:
        return self._append(name, "relu", (source,), self.shapes[source], {})

    def sigmoid(self, name: str, source: str) -> str:
        return self._append(name, "sigmoid", (source,), self.shapes[source], {})

    def gelu(self, name: str, source: str) -> str:
        """x times the normal distribution's probability of less than x, exact (Hendrycks & Gimpel 2016)."""
        return self._append(name, "gelu", (source,), self.shapes[source], {})

    def dropout(self, name: str, source: str, rate: float) -> str:
        return self._append(name, "dropout", (source,), self.shapes[source], {"rate": rate})

    def flatten(self, name: str, source: str) -> str:
        """Channels first: a feature's number is (channel * height + row) * width + column."""
        channels, height, width = self.shapes[source]
        return self._append(name, "flatten", (source,), (channels * height * width,), {})

    def add(self, name: str, *sources: str) -> str:
        shapes = {self.shapes[source] for source in sources}
        if len(shapes) != 1:
            raise InputError(f"{name}: cannot add shapes {sorted(shapes)}; they must be equal")
        return self._append(name, "add", sources, shapes.pop(), {})

    def concat(self, name: str, *sources: str) -> str:
        """Join along the channels."""
        shapes = [self.shapes[source] for source in sources]
        if len({shape[1:] for shape in shapes}) != 1:
            raise InputError(f"{name}: cannot join shapes {shapes}; height and width must be equal")
        return self._append(name, "concat", sources, (sum(shape[0] for shape in shapes), *shapes[0][1:]), {})

    def embedding(self, name: str, source: str, features: int) -> str:
        """A row of the weight for each token: (steps,) to (steps, features)."""
        settings = {"vocabulary": self.vocabulary, "features": features}
        weight = Parameter(f"{name}/weight", (self.vocabulary, features))
        return self._append(name, "embedding", (source,), (*self.shapes[source], features), settings, (weight,))

    def position(self, name: str, source: str) -> str:
        """Adds a learned vector to each step (Vaswani et al. 2017, section 3.5)."""
        shape = self.shapes[source]
        return self._append(name, "position", (source,), shape, {}, (Parameter(f"{name}/weight", shape),))

    def lstm(self, name: str, source: str, hidden: int) -> str:
        """Long short-term memory from a zero state, every step's output (Zaremba et al. 2014, section 3.1)."""
        steps, features = self.shapes[source]
        parameters = (
            Parameter(f"{name}/input_weight", (4 * hidden, features)),
            Parameter(f"{name}/hidden_weight", (4 * hidden, hidden)),
            Parameter(f"{name}/bias", (4 * hidden,)),
        )
        return self._append(name, "lstm", (source,), (steps, hidden), {"hidden": hidden}, parameters)

    def attention(self, name: str, source: str, heads: int) -> str:
        """Multi-head self-attention of every step to every step (Vaswani et al. 2017, section 3.2.2)."""
        steps, features = self.shapes[source]
        if features % heads:
            raise InputError(f"{name}: {features} features do not divide into {heads} heads")
        parameters = (
            Parameter(f"{name}/qkv_weight", (3 * features, features)),
            Parameter(f"{name}/qkv_bias", (3 * features,)),
            Parameter(f"{name}/out_weight", (features, features)),
            Parameter(f"{name}/out_bias", (features,)),
        )
        return self._append(name, "attention", (source,), (steps, features), {"heads": heads}, parameters)

    def token_dense(self, name: str, source: str, features: int) -> str:
        """The same matrix product with the features of each step."""
        return self._dense(name, "token_dense", source, features, bias=True)

    def layer_norm(self, name: str, source: str, epsilon: float = 1e-5) -> str:
        """Normalisation of each step over its features (Ba et al. 2016)."""
        shape = self.shapes[source]
        parameters = (Parameter(f"{name}/scale", shape[-1:]), Parameter(f"{name}/shift", shape[-1:]))
        return self._append(name, "layer_norm", (source,), shape, {"epsilon": epsilon}, parameters)

    def last(self, name: str, source: str) -> str:
        """The last step alone."""
        return self._append(name, "last", (source,), self.shapes[source][1:], {})

    def mean_steps(self, name: str, source: str) -> str:
        return self._append(name, "mean_steps", (source,), self.shapes[source][1:], {})

    def network(self, name: str, size: str) -> Network:
        """The network; its last layer's features are the classes."""
        classes = self.layers[-1].out_shape[0]
        return Network(name, size, self.input_shape, classes, tuple(self.layers), self.vocabulary)

    def _dense(self, name: str, kind: str, source: str, features: int, bias: bool) -> str:
        *steps, before = self.shapes[source]
        weight = Parameter(f"{name}/weight", (features, before))
        settings = {"features": features, "bias": bias}
        shape = (*steps, features)
        return self._append(name, kind, (source,), shape, settings, (weight, *_bias(name, features, bias)))

    def _pool(self, name: str, kind: str, source: str, settings: dict[str, Any]) -> str:
        shape = (self.shapes[source][0], *self._windows(name, source, settings))
        return self._append(name, kind, (source,), shape, settings)

    def _windows(self, name: str, source: str, settings: dict[str, Any]) -> tuple[int, int]:
        _, height, width = self.shapes[source]
        (high, wide), (stride, _), (top, bottom, left, right) = settings["kernel"], settings["stride"], settings["pad"]
        counts = window_count(height, high, stride, top, bottom), window_count(width, wide, stride, left, right)
        if min(counts) < 1:
            sizes = f"a kernel of {high} x {wide} does not fit {height} x {width} values"
            raise InputError(f"{name}: {sizes}; use a larger image")
        return counts

    def _append(
        self,
        name: str,
        kind: str,
        sources: tuple[str, ...],
        out_shape: Shape,
        settings: dict[str, Any],
        parameters: tuple[Parameter, ...] = (),
    ) -> str:
        assert kind in KINDS, kind
        assert name not in self.shapes, name
        in_shapes = tuple(self.shapes[source] for source in sources)
        reaches_parameters = any(self._trained[source] for source in sources)
        forward = forward_flops(kind, settings, in_shapes, out_shape)
        backward = backward_flops(kind, settings, in_shapes, out_shape, reaches_parameters)
        layer = Layer(name, kind, sources, in_shapes, out_shape, settings, parameters, forward, backward)
        self.layers.append(layer)
        self.shapes[name] = out_shape
        self._trained[name] = reaches_parameters or bool(parameters)
        return name


def _window(kernel: Kernel, stride: int, pad: Pad) -> dict[str, Any]:
    sides = [kernel] * 2 if isinstance(kernel, int) else list(kernel)
    edges = [pad] * 4 if isinstance(pad, int) else list(pad)
    return {"kernel": sides, "stride": [stride, stride], "pad": edges}


def _bias(name: str, length: int, wanted: bool) -> tuple[Parameter, ...]:
    return (Parameter(f"{name}/bias", (length,)),) if wanted else ()
