"""LeNet as JAX's own tutorials train: pure functions over a list of parameters, jit of value_and_grad and the update.

Written for comparison. Loaded by worker.py in place of an adapter, with the little of its contract that timing needs.
"""

import os

# As the adapter is told, so that one thread is one thread in both.
os.environ["NPROC"] = os.environ.get("OMP_NUM_THREADS", "1")
if os.environ["NPROC"] == "1":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
if not os.environ.get("CUDA_VISIBLE_DEVICES", "any"):
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax

CHANNELS_LAST = True


def random_layer(key, shape):
    weight_key, bias_key = jax.random.split(key)
    return 0.05 * jax.random.normal(weight_key, shape), 0.05 * jax.random.normal(bias_key, shape[-1:])


def convolve(x, layer):
    weight, bias = layer
    return lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def predict(parameters, images):
    conv1, conv2, (weight1, bias1), (weight2, bias2) = parameters
    x = pool(convolve(pool(convolve(images, conv1)), conv2))
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ weight1 + bias1)
    return x @ weight2 + bias2


def loss(parameters, images, labels):
    log_probabilities = jax.nn.log_softmax(predict(parameters, images))
    return -jnp.mean(jnp.sum(log_probabilities * jax.nn.one_hot(labels, 10), axis=1))


@jax.jit
def update(parameters, images, labels, learning_rate):
    value, gradients = jax.value_and_grad(loss)(parameters, images, labels)
    return jax.tree.map(lambda p, g: p - learning_rate * g, parameters, gradients), value


def versions():
    return {"framework": jax.__version__, "blas": "unknown"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    return Trainer(learning_rate, seed)


class Trainer(object):
    def __init__(self, learning_rate, seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (5, 5, 1, 20), (5, 5, 20, 50), (800, 500), (500, 10)
        self.parameters = [random_layer(key, shape) for key, shape in zip(keys, shapes)]
        self.learning_rate = learning_rate

    def step(self, images, labels):
        self.parameters, value = update(self.parameters, images, labels, self.learning_rate)
        jax.block_until_ready(self.parameters)
        return float(value)

    def shapes(self, images):
        return {}

    def parameter_count(self):
        return sum(leaf.size for leaf in jax.tree.leaves(self.parameters))
