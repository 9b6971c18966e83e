"""Puts layers together and infers their shapes: (channels, height, width) or (features,), without the batch."""

from typing import Any

from steptime.core.errors import InputError
from steptime.core.network import KINDS, Layer, Network, Parameter
from steptime.networks.costs import backward_flops, forward_flops

INPUT = "input"
"""The name by which a layer refers to the network's input."""

Shape = tuple[int, ...]
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

    A kernel that does not fit raises InputError naming the layer.
    """

    def __init__(self, input_shape: Shape) -> None:
        self.input_shape = input_shape
        self.layers: list[Layer] = []
        self.shapes: dict[str, Shape] = {INPUT: input_shape}
        self._trained: dict[str, bool] = {INPUT: False}

    def conv(
        self,
        name: str,
        source: str,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        pad: Pad = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> str:
        """Convolution of a square kernel; channels are split into `groups` that do not see each other."""
        channels = self.shapes[source][0]
        if channels % groups or out_channels % groups:
            raise InputError(f"{name}: {channels} channels to {out_channels} do not divide into {groups} groups")
        settings = _window(kernel, stride, pad) | {"out_channels": out_channels, "groups": groups, "bias": bias}
        shape = (out_channels, *self._windows(name, source, settings))
        weight = Parameter(f"{name}/weight", (out_channels, channels // groups, kernel, kernel))
        return self._append(name, "conv", (source,), shape, settings, (weight, *_bias(name, out_channels, bias)))

    def dense(self, name: str, source: str, features: int, *, bias: bool = True) -> str:
        """Matrix product with every feature of a flat input."""
        weight = Parameter(f"{name}/weight", (features, self.shapes[source][0]))
        settings = {"features": features, "bias": bias}
        return self._append(name, "dense", (source,), (features,), settings, (weight, *_bias(name, features, bias)))

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

    def network(self, name: str, size: str) -> Network:
        """The network; its last layer's features are the classes."""
        return Network(name, size, self.input_shape, self.layers[-1].out_shape[0], tuple(self.layers))

    def _pool(self, name: str, kind: str, source: str, settings: dict[str, Any]) -> str:
        shape = (self.shapes[source][0], *self._windows(name, source, settings))
        return self._append(name, kind, (source,), shape, settings)

    def _windows(self, name: str, source: str, settings: dict[str, Any]) -> tuple[int, int]:
        _, height, width = self.shapes[source]
        (kernel, _), (stride, _), (top, bottom, left, right) = settings["kernel"], settings["stride"], settings["pad"]
        counts = window_count(height, kernel, stride, top, bottom), window_count(width, kernel, stride, left, right)
        if min(counts) < 1:
            raise InputError(f"{name}: a kernel of {kernel} does not fit {height} x {width} values; use a larger image")
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
        backward = backward_flops(kind, forward, reaches_parameters)
        layer = Layer(name, kind, sources, in_shapes, out_shape, settings, parameters, forward, backward)
        self.layers.append(layer)
        self.shapes[name] = out_shape
        self._trained[name] = reaches_parameters or bool(parameters)
        return name


def _window(kernel: int, stride: int, pad: Pad) -> dict[str, Any]:
    edges = [pad] * 4 if isinstance(pad, int) else list(pad)
    return {"kernel": [kernel, kernel], "stride": [stride, stride], "pad": edges}


def _bias(name: str, length: int, wanted: bool) -> tuple[Parameter, ...]:
    return (Parameter(f"{name}/bias", (length,)),) if wanted else ()
