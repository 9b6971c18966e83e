"""A network as every framework receives it: layers in execution order, shapes resolved, costs counted.

Shapes are (channels, height, width), (steps, features) or (features,), without the batch; counts are per sample. This
is the JSON that crosses to the workers, so it holds only strings, numbers and lists.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2}

KINDS = (
    "conv",
    "dense",
    "relu",
    "sigmoid",
    "max_pool",
    "avg_pool",
    "global_avg_pool",
    "lrn",
    "dropout",
    "batch_norm",
    "add",
    "concat",
    "flatten",
    "embedding",
    "position",
    "lstm",
    "attention",
    "token_dense",
    "layer_norm",
    "gelu",
    "last",
    "mean_steps",
)


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor. Its name is the layer's, a slash and its part:

    conv weight (out, in / groups, height, width); dense, token_dense weight (out, in); bias (out,); batch_norm,
    layer_norm scale, shift (channels or features,); embedding weight (vocabulary, features); position weight (steps,
    features); lstm input_weight (4 x hidden, features), hidden_weight (4 x hidden, hidden), bias (4 x hidden,), rows by
    gate: input, forget, cell, output; attention qkv_weight (3 x features, features), qkv_bias, rows by query, key,
    value, each by head, and out_weight (features, features), out_bias.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product


@dataclass(frozen=True)
class Layer:
    """One resolved layer.

    `settings` by kind: conv out_channels, kernel, stride, pad, groups, bias; max_pool/avg_pool kernel, stride, pad;
    dense features, bias; lrn size, alpha, beta, k (alpha is divided by size, as in Caffe); dropout rate; batch_norm
    epsilon; embedding vocabulary, features; lstm hidden; attention heads; token_dense features, bias; layer_norm
    epsilon. `kernel` and `stride` are [height, width]; `pad` is [top, bottom, left, right], explicit, so that no
    framework applies a convention of its own.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0

    @property
    def parameter_count(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def activation_count(self) -> int:
        """Values in the layer's output for one sample."""
        product = 1
        for length in self.out_shape:
            product *= length
        return product


@dataclass(frozen=True)
class Network:
    """A shape-resolved network; the loss is the mean softmax cross-entropy over the batch. `size`: quick or full.

    With a `vocabulary` the input is that many kinds of tokens, `input_shape` = (steps,); 0 means images.
    """

    name: str
    size: str
    input_shape: tuple[int, ...]
    classes: int
    layers: tuple[Layer, ...]
    vocabulary: int = 0

    @property
    def parameter_count(self) -> int:
        return sum(layer.parameter_count for layer in self.layers)

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of one sample's forward pass, a multiply-add counted as two."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> int:
        return sum(layer.backward_flops for layer in self.layers)

    @property
    def activation_count(self) -> int:
        return sum(layer.activation_count for layer in self.layers)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Network":
        data = json.loads(text)
        layers = tuple(
            Layer(
                **{
                    **layer,
                    "inputs": tuple(layer["inputs"]),
                    "in_shapes": tuple(tuple(shape) for shape in layer["in_shapes"]),
                    "out_shape": tuple(layer["out_shape"]),
                    "parameters": tuple(Parameter(p["name"], tuple(p["shape"])) for p in layer["parameters"]),
                }
            )
            for layer in data["layers"]
        )
        return cls(data["name"], data["size"], tuple(data["input_shape"]), data["classes"], layers, data["vocabulary"])
