"""What a layer costs: floating-point operations and bytes.

Convention, per sample: a multiply-add is two operations. A convolution's or dense layer's bias is not counted: it is
where the accumulation starts.

| layer | forward | backward |
|---|---|---|
| conv, dense | 2 x output values x multiply-adds an output value | the same again for the weight gradient, and once more for the input gradient |
| relu, dropout, add | 1 an output value | relu, dropout the same; add 0, the gradient is only passed on |
| max_pool, avg_pool | kernel area an output value | the same |
| global_avg_pool | 1 an input value | the same |
| lrn | 2 x size + 3 a value | twice that |
| batch_norm | 8 a value (mean 1, variance 3, normalise 2, scale and shift 2) | twice that |
| flatten, concat | 0 | 0 |

A layer with no parameters before it needs no input gradient: a first convolution counts its weight gradient only, an
element-wise layer on the network's input nothing. This is what the frameworks compute, too.
"""  # noqa: E501

from math import prod
from typing import Any

from steptime.core.errors import InputError
from steptime.core.network import BYTES_PER_VALUE, Layer

Shape = tuple[int, ...]


def forward_flops(kind: str, settings: dict[str, Any], in_shapes: tuple[Shape, ...], out_shape: Shape) -> int:
    """Operations of one sample's forward pass through a layer of `kind`."""
    values = prod(out_shape)
    match kind:
        case "conv":
            return 2 * values * in_shapes[0][0] // settings["groups"] * prod(settings["kernel"])
        case "dense":
            return 2 * values * in_shapes[0][0]
        case "relu" | "dropout":
            return values
        case "add":
            return values * (len(in_shapes) - 1)
        case "max_pool" | "avg_pool":
            return values * prod(settings["kernel"])
        case "global_avg_pool":
            return prod(in_shapes[0])
        case "lrn":
            return values * (2 * settings["size"] + 3)
        case "batch_norm":
            return values * 8
    return 0


def backward_flops(kind: str, forward: int, needs_input_gradient: bool) -> int:
    """Operations of one sample's backward pass, from the forward's count."""
    if kind in ("conv", "dense"):
        return forward * (2 if needs_input_gradient else 1)
    if not needs_input_gradient and kind != "batch_norm":
        return 0
    if kind in ("lrn", "batch_norm"):
        return 2 * forward
    return 0 if kind == "add" else forward


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
