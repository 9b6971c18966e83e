"""What a layer costs: floating-point operations and bytes.

Convention, per sample: a multiply-add is two operations, a function (power, exponential, square root, erf, tanh) one.
The bias of a matrix product is not counted: it is where the accumulation starts.

| layer | forward | backward |
|---|---|---|
| conv, dense, token_dense | 2 x output values x multiply-adds an output value | the same again for the weight gradient, and once more for the input gradient |
| lstm | 2 x steps x 4 x hidden x (features + hidden), and 20 an output value (three sigmoids of 4, two tanh of 1, the state's and the output's products and sum 4; adding the two products 2) | the products as above (the hidden state's gradient is always needed), and 20 an output value |
| attention | projections 2 x steps x features x 4 x features; scores and weighted values 2 x 2 x steps x steps x features; 5 a score (scale, less the largest, exponential, sum, divide) | twice each product (the input gradient of the first projection only where it is needed), and 5 a score; nothing is computed twice, although fused kernels do |
| relu, dropout, add | 1 an output value | relu, dropout the same; add 0, the gradient is only passed on |
| sigmoid | 4 a value (1 / (1 + exp(-x))) | 3 a value |
| gelu | 5 a value (x / 2 x (1 + erf(x / sqrt 2))) | 11 a value (its derivative needs the normal density, too) |
| max_pool, avg_pool | kernel area an output value | the same |
| global_avg_pool, mean_steps | 1 an input value | the same |
| lrn | 2 x size + 3 a value | twice that |
| batch_norm, layer_norm | 8 a value (mean 1, variance 3, normalise 2, scale and shift 2) | twice that |
| embedding | 0, a look-up | 1 an output value, added to the row |
| position | 1 a value | the same: the parameter's gradient is a sum over the batch |
| flatten, concat, last | 0 | 0 |

A layer with no parameters before it needs no input gradient: a first convolution counts its weight gradient only, an
element-wise layer on the network's input nothing. This is what the frameworks compute, too.
"""  # noqa: E501

from math import prod
from typing import Any

from steptime.core.errors import InputError
from steptime.core.network import BYTES_PER_VALUE, Layer

Shape = tuple[int, ...]

_A_VALUE = {"relu": (1, 1), "dropout": (1, 1), "sigmoid": (4, 3), "gelu": (5, 11), "lstm": (20, 20), "position": (1, 1)}
_A_VALUE |= {"batch_norm": (8, 16), "layer_norm": (8, 16), "embedding": (0, 1)}
"""Operations of an output value, forward and backward, beside matrix products."""

_OWN_GRADIENT = ("batch_norm", "layer_norm", "embedding", "position", "lstm", "attention")
"""Layers with parameters whose backward is not only matrix products: it is computed wherever the layer stands."""


def forward_flops(kind: str, settings: dict[str, Any], in_shapes: tuple[Shape, ...], out_shape: Shape) -> int:
    """Operations of one sample's forward pass through a layer of `kind`."""
    products = sum(matrix_products(kind, settings, in_shapes, out_shape).values())
    return products + _other(kind, settings, in_shapes, out_shape, backward=False)


def backward_flops(
    kind: str, settings: dict[str, Any], in_shapes: tuple[Shape, ...], out_shape: Shape, needs_input_gradient: bool
) -> int:
    """Operations of one sample's backward pass through a layer of `kind`."""
    products = matrix_products(kind, settings, in_shapes, out_shape)
    flops = 2 * sum(products.values()) - (0 if needs_input_gradient else products["of the input"])
    if needs_input_gradient or kind in _OWN_GRADIENT:
        flops += _other(kind, settings, in_shapes, out_shape, backward=True)
    return flops


def matrix_products(
    kind: str, settings: dict[str, Any], in_shapes: tuple[Shape, ...], out_shape: Shape
) -> dict[str, int]:
    """Operations of a layer's matrix products, one sample's forward pass, and how many of them take the input."""
    first, inner = 0, 0
    match kind:
        case "conv":
            first = 2 * prod(out_shape) * in_shapes[0][0] // settings["groups"] * prod(settings["kernel"])
        case "dense" | "token_dense":
            first = 2 * prod(out_shape) * in_shapes[0][-1]
        case "lstm":
            (steps, features), hidden = in_shapes[0], settings["hidden"]
            first, inner = 2 * steps * 4 * hidden * features, 2 * steps * 4 * hidden * hidden
        case "attention":
            steps, features = in_shapes[0]
            first = 2 * steps * features * 3 * features
            inner = 2 * 2 * steps * steps * features + 2 * steps * features * features
    return {"of the input": first, "inner": inner}


def _other(kind: str, settings: dict[str, Any], in_shapes: tuple[Shape, ...], out_shape: Shape, backward: bool) -> int:
    """Operations beside matrix products."""
    values = prod(out_shape)
    match kind:
        case "add":
            return 0 if backward else values * (len(in_shapes) - 1)
        case "max_pool" | "avg_pool":
            return values * prod(settings["kernel"])
        case "global_avg_pool" | "mean_steps":
            return prod(in_shapes[0])
        case "lrn":
            return values * (2 * settings["size"] + 3) * (2 if backward else 1)
        case "attention":
            return 5 * settings["heads"] * in_shapes[0][0] ** 2
    return values * _A_VALUE.get(kind, (0, 0))[backward]


def parameter_bytes(layer: Layer, dtype: str = "float32") -> int:
    """Bytes of the layer's weights, and so of its gradient message."""
    return layer.parameter_count * _bytes_per_value(dtype)


def activation_bytes(layer: Layer, batch: int, dtype: str = "float32") -> int:
    """Bytes of the layer's output for a batch of `batch` samples."""
    return layer.activation_count * batch * _bytes_per_value(dtype)


def _bytes_per_value(dtype: str) -> int:
    if dtype not in BYTES_PER_VALUE:
        raise InputError(f"dtype = {dtype!r}: unknown; known: {', '.join(BYTES_PER_VALUE)}")
    return BYTES_PER_VALUE[dtype]
