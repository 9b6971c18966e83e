"""JAX. The whole step is one jitted function that is given the weights' memory. See adapters/__init__.py.

XLA fuses layers and phases, so none can be timed. Images and activations are channels-last inside, which is what XLA's
CPU convolutions want; weights are transposed when they are loaded and gradients when they are handed out, among them
the dense weights after a flatten, whose features are numbered channels-first outside.
"""

import functools
import os

import numpy as np

# Before jax is loaded: its thread pool is as wide as this says, and one thread must not spread over two cores.
THREADS = os.environ.get("OMP_NUM_THREADS", "1")
os.environ["NPROC"] = THREADS
if THREADS == "1":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
if not os.environ.get("CUDA_VISIBLE_DEVICES", "any"):
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

CHANNELS_LAST = True
CONVOLUTION = ("NHWC", "HWIO", "NHWC")


def versions():
    return {"framework": jax.__version__, "blas": "XLA (Eigen)"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if str(threads) != THREADS:
        raise ValueError("threads = %d: JAX was loaded for %s; start a child for each" % (threads, THREADS))
    if device == "cuda" and jax.default_backend() != "gpu":
        raise ValueError("device = 'cuda': this JAX sees no GPU; install its CUDA plugin")
    # float32 means float32.
    jax.config.update("jax_default_matmul_precision", "float32")
    return Trainer(network, weights, learning_rate, seed)


def edges(settings):
    """The described padding of height and width."""
    top, bottom, left, right = settings["pad"]
    return (top, bottom), (left, right)


def windows(x, start, combine, settings):
    """`combine` over the described windows of height and width."""
    kernel, stride = settings["kernel"], settings["stride"]
    pad = ((0, 0), *edges(settings), (0, 0))
    return lax.reduce_window(x, np.float32(start), combine, (1, *kernel, 1), (1, *stride, 1), pad)


def operation(layer):
    """The function (inputs, weights, training, key) -> output of one layer; the key is for dropout."""
    kind, s = layer["kind"], layer["settings"]
    if kind not in OPERATIONS:
        raise NotImplementedError("layer %s: kind %r is not known here" % (layer["name"], kind))
    return functools.partial(OPERATIONS[kind], s)


def convolution(s, x, w, training, key):
    groups = s["groups"]
    if groups > 1 and jax.default_backend() == "cpu":
        # One convolution a group, joined: XLA's CPU code for feature_group_count is slower.
        parts = zip(jnp.split(x[0], groups, -1), jnp.split(w[0], groups, -1))
        y = jnp.concatenate([convolve(s, part, weight, 1) for part, weight in parts], -1)
    else:
        y = convolve(s, x[0], w[0], groups)
    return y + w[1] if s["bias"] else y


def convolve(s, x, weight, groups):
    return lax.conv_general_dilated(
        x, weight, s["stride"], edges(s), dimension_numbers=CONVOLUTION, feature_group_count=groups
    )


def dense(s, x, w, training, key):
    y = x[0] @ w[0]
    return y + w[1] if len(w) > 1 else y


def max_pool(s, x, w, training, key):
    return windows(x[0], -np.inf, lax.max, s)


def avg_pool(s, x, w, training, key):
    return windows(x[0], 0, lax.add, s) / (s["kernel"][0] * s["kernel"][1])


def lrn(s, x, w, training, key):
    half = s["size"] // 2
    pad = ((0, 0), (0, 0), (0, 0), (half, s["size"] - 1 - half))
    total = lax.reduce_window(x[0] * x[0], np.float32(0), lax.add, (1, 1, 1, s["size"]), (1, 1, 1, 1), pad)
    return x[0] * (s["k"] + s["alpha"] / s["size"] * total) ** -s["beta"]


def dropout(s, x, w, training, key):
    if not training:
        return x[0]
    keep = 1 - s["rate"]
    return jnp.where(jax.random.bernoulli(key, keep, x[0].shape), x[0] / keep, 0)


def normalised(x, axes, epsilon):
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + epsilon)


def batch_norm(s, x, w, training, key):
    return normalised(x[0], (0, 1, 2), s["epsilon"]) * w[0] + w[1]


def layer_norm(s, x, w, training, key):
    return normalised(x[0], (-1,), s["epsilon"]) * w[0] + w[1]


def lstm(s, x, w, training, key):
    fed, (input_weight, hidden_weight, bias) = x[0], w
    zeros = jnp.zeros((fed.shape[0], hidden_weight.shape[0]), fed.dtype)

    def one(state, above):
        h, c = state
        i, f, g, o = jnp.split(above + h @ hidden_weight, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    _, hidden = lax.scan(one, (zeros, zeros), (fed @ input_weight + bias).swapaxes(0, 1))
    return hidden.swapaxes(0, 1)


def attention(s, x, w, training, key):
    batch, steps, features = x[0].shape
    qkv = (x[0] @ w[0] + w[1]).reshape(batch, steps, 3, s["heads"], features // s["heads"])
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return mixed.reshape(batch, steps, features) @ w[2] + w[3]


OPERATIONS = {
    "conv": convolution,
    "dense": dense,
    "token_dense": dense,
    "relu": lambda s, x, w, training, key: jax.nn.relu(x[0]),
    "sigmoid": lambda s, x, w, training, key: jax.nn.sigmoid(x[0]),
    "gelu": lambda s, x, w, training, key: jax.nn.gelu(x[0], approximate=False),
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": lambda s, x, w, training, key: x[0].mean((1, 2)),
    "lrn": lrn,
    "dropout": dropout,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "add": lambda s, x, w, training, key: sum(x[1:], x[0]),
    "concat": lambda s, x, w, training, key: jnp.concatenate(x, -1),
    "flatten": lambda s, x, w, training, key: x[0].reshape(x[0].shape[0], -1),
    "embedding": lambda s, x, w, training, key: w[0][x[0]],
    "position": lambda s, x, w, training, key: x[0] + w[0],
    "lstm": lstm,
    "last": lambda s, x, w, training, key: x[0][:, -1],
    "mean_steps": lambda s, x, w, training, key: x[0].mean(1),
    "attention": attention,
}


def weight_orders(network):
    """{parameter: function from the description's layout to ours and back}, for those that differ.

    A flatten numbers features channels-first in the description and channels-last here; element-wise layers between
    it and the dense layer keep the numbering.
    """
    orders, numbering = {}, {}
    for layer in network["layers"]:
        kind, source = layer["kind"], layer["inputs"][0]
        names = [parameter["name"] for parameter in layer["parameters"]]
        if kind == "flatten" and len(layer["in_shapes"][0]) == 3:
            shape = layer["in_shapes"][0]
            numbering[layer["name"]] = np.arange(np.prod(shape)).reshape(shape).transpose(1, 2, 0).ravel()
        elif kind in ("relu", "sigmoid", "gelu", "dropout") and source in numbering:
            numbering[layer["name"]] = numbering[source]
        elif kind == "conv":
            orders[names[0]] = (
                lambda values: values.transpose(2, 3, 1, 0),
                lambda values: values.transpose(3, 2, 0, 1),
            )
        elif kind == "dense":
            orders[names[0]] = dense_order(numbering.get(source))
        elif kind in ("token_dense", "lstm", "attention"):
            orders.update((name, (np.transpose, np.transpose)) for name in names if name.endswith("weight"))
    return orders


def dense_order(numbering):
    if numbering is None:
        return np.transpose, np.transpose
    back = np.argsort(numbering)
    return lambda values: values.T[numbering], lambda values: values[back].T


class Trainer(object):
    def __init__(self, network, weights, learning_rate, seed):
        self._orders = weight_orders(network)
        self._layers = [
            (layer["name"], layer["inputs"], [p["name"] for p in layer["parameters"]], operation(layer))
            for layer in network["layers"]
        ]
        self._weights = {name: jnp.asarray(self._ours(name, values)) for name, values in weights.items()}
        self._drops = any(layer["kind"] == "dropout" for layer in network["layers"])
        self._key = jax.random.key(seed)
        self._steps = 0

        def whole_step(weights, images, labels, key, steps):
            key = jax.random.fold_in(key, steps) if self._drops else None
            loss, gradients = jax.value_and_grad(self._loss)(weights, images, labels, key)
            return {name: weights[name] - learning_rate * gradients[name] for name in weights}, loss

        self._step = jax.jit(whole_step, donate_argnums=0)
        self._evaluate = jax.jit(jax.value_and_grad(self._loss_and_outputs, has_aux=True))

    def step(self, images, labels):
        self._weights, loss = self._step(self._weights, images, labels, self._key, self._steps)
        self._steps += 1
        jax.block_until_ready(self._weights)
        return float(loss)

    def gradients(self, images, labels):
        (loss, outputs), gradients = self._evaluate(self._weights, images, labels)
        return dict(self.arrays(gradients), outputs=np.asarray(outputs), loss=np.asarray(loss))

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of tensors in our layout."""
        arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
        return {name: self._orders[name][1](a) if name in self._orders else a for name, a in arrays.items()}

    def flops(self, images, labels):
        """XLA counts a whole fused program, element-wise operations included: nothing to compare."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        found = {}

        def record(weights, images):
            for name, x in self._outputs(weights, images, False, None).items():
                found[name] = list(x.shape[-1:] + x.shape[1:-1]) if x.ndim == 4 else list(x.shape[1:])

        jax.eval_shape(record, self._weights, images)
        del found["input"]
        return found

    def parameter_count(self):
        return sum(tensor.size for tensor in self._weights.values())

    def device_peak_bytes(self):
        statistics = jax.devices()[0].memory_stats()
        return statistics["peak_bytes_in_use"] if statistics else None

    def _outputs(self, weights, images, training, key):
        outputs = {"input": images}
        for number, (name, sources, names, run) in enumerate(self._layers):
            own = None if key is None else jax.random.fold_in(key, number)
            outputs[name] = run([outputs[source] for source in sources], [weights[n] for n in names], training, own)
        return outputs

    def _loss(self, weights, images, labels, key):
        return mean_loss(self._outputs(weights, images, True, key)[self._layers[-1][0]], labels)

    def _loss_and_outputs(self, weights, images, labels):
        outputs = self._outputs(weights, images, False, None)[self._layers[-1][0]]
        return mean_loss(outputs, labels), outputs

    def _ours(self, name, values):
        return self._orders[name][0](values) if name in self._orders else values


def mean_loss(outputs, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], -1).mean()
