"""Keras 3 on TensorFlow: what one step of `model.fit` costs, Keras' own work included. See adapters/__init__.py.

A functional model of keras.layers, compiled with SGD and SparseCategoricalCrossentropy, one `train_on_batch` a step:
the public call of the very function that `fit` runs on a batch, with its metrics, conversions and checks; only `fit`'s
iterator and callbacks are not in it (input is timed apart). The rest is Keras' default: on a CPU one tf.function,
beside a GPU compiled by XLA (jit_compile="auto"). Layers and phases are inside it, so none can be timed. In training
Keras' batch norm keeps running statistics, which nothing reads here.
"""

import os

import numpy as np

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import tensorflow as tf

CHANNELS_LAST = True
L = keras.layers


def versions():
    try:
        from tensorflow.python.util import _pywrap_util_port

        blas = "oneDNN" if _pywrap_util_port.IsMklEnabled() else "Eigen"
    except (ImportError, AttributeError):
        blas = "unknown"
    return {"framework": keras.__version__, "blas": "%s of TensorFlow %s" % (blas, tf.__version__)}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if tf.config.threading.get_intra_op_parallelism_threads() != threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    if tf.config.threading.get_inter_op_parallelism_threads() != 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    if device == "cuda" and not tf.config.list_physical_devices("GPU"):
        raise ValueError("device = 'cuda': this TensorFlow sees no GPU")
    # float32 means float32.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.utils.set_random_seed(seed)
    keras.config.set_image_data_format("channels_last")
    return Trainer(network, weights, batch, learning_rate, device)


class LocalResponseNormalization(L.Layer):
    def __init__(self, settings, name):
        super().__init__(name=name)
        self._settings = settings

    def call(self, x):
        s = self._settings
        return tf.nn.local_response_normalization(x, s["size"] // 2, s["k"], s["alpha"] / s["size"], s["beta"])


class PadLowest(L.Layer):
    """Minus infinity around the input, so that padding never wins in max pooling."""

    def __init__(self, edges):
        super().__init__()
        self._edges = edges

    def call(self, x):
        return keras.ops.pad(x, ((0, 0), *self._edges, (0, 0)), constant_values=-float("inf"))


class Position(L.Layer):
    """Adds a learned vector to each step; Keras itself has no such layer."""

    def build(self, shape):
        self.position = self.add_weight(shape=shape[1:], name="position")

    def call(self, x):
        return x + self.position


def edges(settings):
    top, bottom, left, right = settings["pad"]
    return ((top, bottom), (left, right))


def is_same(layer):
    """Whether the described padding is what padding="same" gives."""
    s = layer["settings"]
    for (before, after), kernel, stride, length, count in zip(
        edges(s), s["kernel"], s["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        total = max(0, (count - 1) * stride + kernel - length)
        if count != -(-length // stride) or before != total // 2 or after != total - total // 2:
            return False
    return True


def windowed(layer, x, make, pad_layer):
    """A layer that slides a window: its own padding where that is the described one, else a padding layer before."""
    if not any(layer["settings"]["pad"]):
        return make("valid")(x)
    if is_same(layer) and layer["kind"] != "avg_pool":
        # Average pooling would leave the padding out of the mean.
        return make("same")(x)
    return make("valid")(pad_layer(edges(layer["settings"]))(x))


def apply(layer, inputs):
    """The layer's output (a KerasTensor) and the Keras layer that holds its weights, if any."""
    kind, s, name = layer["kind"], layer["settings"], layer["name"]
    made = []

    def new(kind_of_layer, *arguments, **options):
        made.append(kind_of_layer(*arguments, name=name, **options))
        return made[-1]

    x = inputs[0]
    if kind == "conv":
        options = {"strides": s["stride"], "groups": s["groups"], "use_bias": s["bias"]}
        x = windowed(
            layer, x, lambda pad: new(L.Conv2D, s["out_channels"], s["kernel"], padding=pad, **options), L.ZeroPadding2D
        )
    elif kind in ("dense", "token_dense"):
        x = new(L.Dense, layer["out_shape"][-1], use_bias=len(layer["parameters"]) > 1)(x)
    elif kind in ("relu", "sigmoid", "gelu"):
        x = new(L.Activation, kind)(x)
    elif kind == "max_pool":
        x = windowed(layer, x, lambda pad: new(L.MaxPooling2D, s["kernel"], s["stride"], padding=pad), PadLowest)
    elif kind == "avg_pool":
        x = windowed(
            layer, x, lambda pad: new(L.AveragePooling2D, s["kernel"], s["stride"], padding=pad), L.ZeroPadding2D
        )
    elif kind == "global_avg_pool":
        x = new(L.GlobalAveragePooling2D)(x)
    elif kind == "lrn":
        x = LocalResponseNormalization(s, name)(x)
    elif kind == "dropout":
        x = new(L.Dropout, s["rate"])(x)
    elif kind == "batch_norm":
        x = new(L.BatchNormalization, epsilon=s["epsilon"])(x)
    elif kind == "layer_norm":
        x = new(L.LayerNormalization, epsilon=s["epsilon"])(x)
    elif kind == "add":
        x = new(L.Add)(inputs)
    elif kind == "concat":
        x = new(L.Concatenate)(inputs)
    elif kind == "flatten":
        x = new(L.Flatten)(x)
    elif kind == "embedding":
        vocabulary, features = layer["parameters"][0]["shape"]
        x = new(L.Embedding, vocabulary, features)(x)
    elif kind == "position":
        x = new(Position)(x)
    elif kind == "lstm":
        x = new(L.LSTM, layer["out_shape"][-1], return_sequences=True)(x)
    elif kind == "last":
        x = x[:, -1]
    elif kind == "mean_steps":
        x = new(L.GlobalAveragePooling1D)(x)
    elif kind == "attention":
        x = new(L.MultiHeadAttention, s["heads"], x.shape[-1] // s["heads"])(x, x)
    else:
        raise NotImplementedError("layer %s: kind %r is not known here" % (name, kind))
    return x, made[0] if made else None


class Binding(object):
    """The Keras variables of one parameter, and how its values are split over them and joined again."""

    def __init__(self, variables, split, join):
        self.variables, self.split, self.join = variables, split, join


def alike(variable):
    return Binding([variable], lambda values: [values], lambda parts: parts[0])


def transposed(variable, there, back):
    return Binding([variable], lambda values: [values.transpose(there)], lambda parts: parts[0].transpose(back))


def dense_binding(variable, numbering):
    if numbering is None:
        return transposed(variable, (1, 0), (1, 0))
    order = np.argsort(numbering)
    return Binding([variable], lambda values: [values.T[numbering]], lambda parts: parts[0][order].T)


def attention_bindings(made):
    """Queries, keys and values are one parameter in the description and three here, split into heads."""
    dense = [made.query_dense, made.key_dense, made.value_dense]
    features, heads, width = dense[0].kernel.shape
    joined = heads * width
    return [
        Binding(
            [part.kernel for part in dense],
            lambda values: [part.T.reshape(features, heads, width) for part in np.split(values, 3)],
            lambda parts: np.concatenate([part.reshape(features, joined).T for part in parts]),
        ),
        Binding(
            [part.bias for part in dense],
            lambda values: [part.reshape(heads, width) for part in np.split(values, 3)],
            lambda parts: np.concatenate([part.ravel() for part in parts]),
        ),
        Binding(
            [made.output_dense.kernel],
            lambda values: [values.T.reshape(heads, width, features)],
            lambda parts: parts[0].reshape(joined, features).T,
        ),
        alike(made.output_dense.bias),
    ]


def bindings(layer, made, numbering):
    """One Binding a parameter, in the description's order. `numbering`: of the features after a flatten, or None."""
    kind, trained = layer["kind"], made.trainable_variables
    if kind == "attention":
        return attention_bindings(made)
    if kind == "conv":
        first = transposed(trained[0], (2, 3, 1, 0), (3, 2, 0, 1))
    elif kind == "dense":
        first = dense_binding(trained[0], numbering)
    elif kind in ("token_dense", "lstm"):
        first = transposed(trained[0], (1, 0), (1, 0))
    else:
        first = alike(trained[0])
    rest = [transposed(v, (1, 0), (1, 0)) if kind == "lstm" and len(v.shape) == 2 else alike(v) for v in trained[1:]]
    return [first, *rest]


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, device):
        self._cuda = device == "cuda"
        self._found_shapes, self._bindings, self._dropouts = {}, {}, []
        self._model = self._functional_model(network, batch)
        for name, binding in self._bindings.items():
            for variable, values in zip(binding.variables, binding.split(weights[name])):
                variable.assign(values)
        self._model.compile(
            optimizer=keras.optimizers.SGD(learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        compiled = self._model.jit_compile
        self._evaluate = tf.function(self._loss_outputs_and_gradients, jit_compile=compiled, autograph=False)

    def step(self, images, labels):
        loss = self._model.train_on_batch(images, labels)
        if self._cuda:
            tf.test.experimental.sync_devices()
        return float(np.ravel(loss)[0])

    def gradients(self, images, labels):
        # Batch norm has to use the batch's statistics and dropout to drop nothing: training, with no rate.
        rates = [layer.rate for layer in self._dropouts]
        for layer in self._dropouts:
            layer.rate = 0
        loss, outputs, gradients = self._evaluate(tf.convert_to_tensor(images), tf.convert_to_tensor(labels))
        for layer, rate in zip(self._dropouts, rates):
            layer.rate = rate
        found = {variable.path: tensor for variable, tensor in zip(self._model.trainable_variables, gradients)}
        arrays = self.arrays({n: [found[v.path] for v in b.variables] for n, b in self._bindings.items()})
        return dict(arrays, outputs=outputs.numpy(), loss=loss.numpy())

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of {parameter: the tensors that hold its parts}."""
        return {
            name: self._bindings[name].join([np.asarray(tf.convert_to_tensor(part)) for part in parts])
            for name, parts in tensors.items()
        }

    def flops(self, images, labels):
        return {"forward": None, "backward": None}

    def shapes(self, images):
        return self._found_shapes

    def parameter_count(self):
        return int(sum(np.prod(variable.shape) for variable in self._model.trainable_variables))

    def device_peak_bytes(self):
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] if self._cuda else None

    def _functional_model(self, network, batch):
        shape = list(network["input_shape"])
        fed = keras.Input(
            batch_shape=[batch, *shape[1:], *shape[:1]] if len(shape) == 3 else [batch, *shape],
            dtype="int64" if network["vocabulary"] else "float32",
        )
        outputs, numbering = {"input": fed}, {}
        for layer in network["layers"]:
            name, kind, source = layer["name"], layer["kind"], layer["inputs"][0]
            x, made = apply(layer, [outputs[source] for source in layer["inputs"]])
            outputs[name] = x
            inner = list(x.shape[1:])
            self._found_shapes[name] = inner[-1:] + inner[:-1] if len(inner) == 3 else inner
            if kind == "flatten" and len(layer["in_shapes"][0]) == 3:
                inner = layer["in_shapes"][0]
                numbering[name] = np.arange(np.prod(inner)).reshape(inner).transpose(1, 2, 0).ravel()
            elif kind in ("relu", "sigmoid", "gelu", "dropout") and source in numbering:
                numbering[name] = numbering[source]
            if kind == "dropout":
                self._dropouts.append(made)
            if layer["parameters"]:
                names = [parameter["name"] for parameter in layer["parameters"]]
                self._bindings.update(zip(names, bindings(layer, made, numbering.get(source))))
        return keras.Model(fed, x)

    def _loss_outputs_and_gradients(self, images, labels):
        with tf.GradientTape() as tape:
            outputs = self._model(images, training=True)
            loss = self._model.compute_loss(images, labels, outputs)
        return loss, outputs, tape.gradient(loss, [v.value for v in self._model.trainable_variables])
