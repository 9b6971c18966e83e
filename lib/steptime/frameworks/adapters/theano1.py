"""Theano 1.0: the whole step is one compiled function that updates shared weights. See adapters/__init__.py.

What Theano has no operation for is composed as its users did: local response normalisation as in Lasagne, an LSTM as
in Theano's own tutorial (one product for all steps' inputs, then a scan), uneven padding by writing into a larger
array. Dense weights are kept (in, out). Compiled code stays in Theano's compile folder and serves later processes,
so the first build of a network takes minutes and later ones seconds.
"""

import ctypes
import json
import time

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet.bn import AbstractBatchNormTrain
from theano.tensor.signal.pool import pool_2d

theano.config.floatX = "float32"

CHANNELS_LAST = False


def versions():
    return {"framework": theano.__version__, "blas": blas()}


def blas():
    """The library that Theano's convolutions and products call, as it names itself."""
    flags = theano.config.blas.ldflags
    if not flags:
        return "none: Theano's own loops"
    library = openblas()
    if "openblas" not in flags or library is None:
        return flags
    library.openblas_get_config.restype = ctypes.c_char_p
    return library.openblas_get_config().decode()


def openblas():
    try:
        return ctypes.CDLL("libopenblas.so.0")
    except OSError:
        return None


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %r: Theano's GPU back end needs libgpuarray, which has no package" % device)
    refuse_repeated_maxima(network)
    use_threads(threads)
    return Trainer(network, weights, batch, learning_rate, seed)


def refuse_repeated_maxima(network):
    """Theano hands a window's gradient to each of its equal maxima, whole: the sum is too large if there are several.

    Behind a ReLU only zeros are equal, and there its gradient is 0. But overlapping windows repeat their maximum, and
    a pooling of their outputs meets it several times.
    """
    kinds = {layer["name"]: layer["kind"] for layer in network["layers"]}
    for layer in network["layers"]:
        if layer["kind"] == "max_pool" and kinds.get(layer["inputs"][0]) == "max_pool":
            raise NotImplementedError(
                "layer %s: it pools what %s pooled, and Theano's max pooling counts the gradient of equal maxima once"
                " for each of them" % (layer["name"], layer["inputs"][0])
            )


def use_threads(threads):
    """For code that Theano makes from now on, and for the BLAS. With OpenMP a convolution shares out its samples."""
    theano.config.openmp = threads > 1
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
    library = openblas()
    if library is not None:
        library.openblas_set_num_threads(threads)


def padded(x, layer, batch, value):
    """A copy of the input with the described edges set to `value`."""
    channels, height, width = layer["in_shapes"][0]
    top, bottom, left, right = layer["settings"]["pad"]
    whole = T.alloc(np.float32(value), batch, channels, height + top + bottom, width + left + right)
    return T.set_subtensor(whole[:, :, top : top + height, left : left + width], x)


def convolution(layer, batch):
    s = layer["settings"]
    top, bottom, left, right = s["pad"]
    options = {
        "input_shape": (batch, *layer["in_shapes"][0]),
        "filter_shape": tuple(layer["parameters"][0]["shape"]),
        "border_mode": ((top, bottom), (left, right)),
        "subsample": tuple(s["stride"]),
        "num_groups": s["groups"],
        "filter_flip": False,
    }

    def run(x, w, training):
        y = T.nnet.conv2d(x[0], w[0], **options)
        return y + w[1].dimshuffle("x", 0, "x", "x") if s["bias"] else y

    return run


def max_pool(layer, batch):
    """Padding never wins: Theano leaves it, and what lies past the border, out of the window."""
    s, wanted = layer["settings"], tuple(layer["out_shape"][1:])
    sizes = list(zip(layer["in_shapes"][0][1:], s["kernel"], s["stride"], (s["pad"][0], s["pad"][2])))
    kernel, stride, begin = tuple(s["kernel"]), tuple(s["stride"]), (s["pad"][0], s["pad"][2])
    even = tuple((length + 2 * pad - window) // step + 1 for length, window, step, pad in sizes)
    if even == wanted and all(pad < window for _, window, _, pad in sizes):
        return lambda x, w, training: pool_2d(x[0], kernel, True, stride, begin, "max")
    if begin == (0, 0) and tuple(border_windows(*size[:3]) for size in sizes) == wanted:
        return lambda x, w, training: pool_2d(x[0], kernel, False, stride, begin, "max")
    return lambda x, w, training: pool_2d(padded(x[0], layer, batch, -np.inf), kernel, True, stride, (0, 0), "max")


def border_windows(length, window, stride):
    """How many windows pool_2d makes with ignore_border=False."""
    if stride >= window:
        return (length - 1) // stride + 1
    return max(0, (length - 1 - window + stride) // stride) + 1


def avg_pool(layer, batch):
    s = layer["settings"]
    top, bottom, left, right = s["pad"]
    kernel, stride, how = tuple(s["kernel"]), tuple(s["stride"]), "average_inc_pad"
    if top == bottom and left == right:
        return lambda x, w, training: pool_2d(x[0], kernel, True, stride, (top, left), how)
    return lambda x, w, training: pool_2d(padded(x[0], layer, batch, 0), kernel, True, stride, (0, 0), how)


def lrn(layer, batch):
    s = layer["settings"]
    channels, height, width = layer["in_shapes"][0]
    before = s["size"] // 2
    if s["size"] % 2 == 0:
        raise NotImplementedError("layer %s: an even size has no middle channel" % layer["name"])

    def run(x, w, training):
        squares = T.alloc(np.float32(0), batch, channels + 2 * before, height, width)
        squares = T.set_subtensor(squares[:, before : before + channels], T.sqr(x[0]))
        scale = s["k"]
        for shift in range(s["size"]):
            scale += s["alpha"] / s["size"] * squares[:, shift : shift + channels]
        return x[0] / scale ** s["beta"]

    return run


def linear(x, weight, bias, shape):
    """x @ weight + bias; `shape`: of the result, a product of matrices being what the BLAS knows."""
    y = T.dot(x.reshape((-1, x.shape[-1])) if x.ndim > 2 else x, weight)
    y = y if bias is None else y + bias
    return y.reshape(shape) if x.ndim > 2 else y


def lstm(layer, batch):
    steps, hidden = layer["out_shape"]

    def step(entered, h, c, weight):
        gates = entered + T.dot(h, weight)
        i, f, g, o = (gates[:, n * hidden : (n + 1) * hidden] for n in range(4))
        c = T.nnet.sigmoid(f) * c + T.nnet.sigmoid(i) * T.tanh(g)
        return T.nnet.sigmoid(o) * T.tanh(c), c

    def run(x, w, training):
        entered = linear(x[0], w[0], w[2], (batch, steps, 4 * hidden)).dimshuffle(1, 0, 2)
        zeros = T.unbroadcast(T.alloc(np.float32(0), batch, hidden), 0, 1)
        (h, _), _ = theano.scan(step, entered, [zeros, zeros], [w[1]], n_steps=steps, strict=True)
        return h.dimshuffle(1, 0, 2)

    return run


def attention(layer, batch):
    steps, features = layer["out_shape"]
    heads = layer["settings"]["heads"]
    width = features // heads

    def run(x, w, training):
        mixed = linear(x[0], w[0], w[1], (batch, steps, 3, heads, width)).dimshuffle(2, 0, 3, 1, 4)
        query, key, value = (mixed[n].reshape((batch * heads, steps, width)) for n in range(3))
        scores = T.batched_dot(query, key.dimshuffle(0, 2, 1)) * width**-0.5
        shares = T.nnet.softmax(scores.reshape((-1, steps))).reshape((batch * heads, steps, steps))
        joined = T.batched_dot(shares, value).reshape((batch, heads, steps, width)).dimshuffle(0, 2, 1, 3)
        return linear(joined.reshape((batch, steps, features)), w[2], w[3], (batch, steps, features))

    return run


def layer_norm(layer, batch):
    epsilon = layer["settings"]["epsilon"]

    def run(x, w, training):
        centred = x[0] - x[0].mean(-1, keepdims=True)
        return centred / T.sqrt(T.sqr(centred).mean(-1, keepdims=True) + epsilon) * w[0] + w[1]

    return run


COMPOSED = {
    "conv": convolution,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "lrn": lrn,
    "lstm": lstm,
    "attention": attention,
    "layer_norm": layer_norm,
}


def operation(layer, batch, random):
    """The function (inputs, weights, training) -> output of one layer; `random` draws dropout's masks."""
    kind, s, shape = layer["kind"], layer["settings"], (batch, *layer["out_shape"])
    if kind in COMPOSED:
        return COMPOSED[kind](layer, batch)
    if kind in ("dense", "token_dense"):
        return lambda x, w, training: linear(x[0], w[0], w[1] if len(w) > 1 else None, shape)
    if kind == "relu":
        return lambda x, w, training: T.nnet.relu(x[0])
    if kind == "sigmoid":
        return lambda x, w, training: T.nnet.sigmoid(x[0])
    if kind == "gelu":
        return lambda x, w, training: x[0] * (0.5 * (1 + T.erf(x[0] * 0.5**0.5)))
    if kind == "global_avg_pool":
        return lambda x, w, training: x[0].mean((2, 3))
    if kind == "dropout":
        keep = 1 - s["rate"]

        def dropout(x, w, training):
            return x[0] * random.binomial(shape, p=keep, dtype="float32") / keep if training else x[0]

        return dropout
    if kind == "batch_norm":
        # The operation itself: batch_normalization_train would refuse an epsilon of 1e-5, which float32 rounds down.
        normalise, epsilon = AbstractBatchNormTrain((0, 2, 3)), np.float32(s["epsilon"])
        return lambda x, w, training: normalise(x[0], *channelwise(w), epsilon=epsilon)[0]
    if kind == "add":
        return lambda x, w, training: sum(x[1:], x[0])
    if kind == "concat":
        return lambda x, w, training: T.concatenate(x, 1)
    if kind == "flatten":
        return lambda x, w, training: x[0].reshape(shape)
    if kind == "embedding":
        return lambda x, w, training: w[0][x[0].flatten()].reshape(shape)
    if kind == "position":
        return lambda x, w, training: x[0] + w[0].dimshuffle("x", 0, 1)
    if kind == "last":
        return lambda x, w, training: x[0][:, -1]
    if kind == "mean_steps":
        return lambda x, w, training: x[0].mean(1)
    raise NotImplementedError("layer %s: kind %r is unknown to this adapter" % (layer["name"], kind))


def channelwise(vectors):
    return [vector.dimshuffle("x", 0, "x", "x") for vector in vectors]


def transposed(network):
    """Names of the parameters that are kept (in, out)."""
    names = set()
    for layer in network["layers"]:
        found = [parameter["name"] for parameter in layer["parameters"]]
        if layer["kind"] in ("dense", "token_dense"):
            names.add(found[0])
        elif layer["kind"] == "lstm":
            names.update(found[:2])
        elif layer["kind"] == "attention":
            names.update([found[0], found[2]])
    return names


def mean_loss(outputs, labels):
    return T.nnet.categorical_crossentropy(T.nnet.softmax(outputs), labels).mean()


def variable(shape, dtype="float32"):
    """A symbol for an array with so many axes, none of them broadcast."""
    return T.TensorType(dtype, (False,) * len(shape))()


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, seed):
        self._network = network
        self._batch = batch
        self._learning_rate = np.float32(learning_rate)
        self._transposed = transposed(network)
        values = {name: a.T if name in self._transposed else a for name, a in weights.items()}
        self._weights = {name: theano.shared(np.array(a, order="C"), name) for name, a in values.items()}
        random = MRG_RandomStreams(seed + 1)  # 0 is not a seed there
        self._operations = [operation(layer, batch, random) for layer in network["layers"]]
        dtype = "int64" if network["vocabulary"] else "float32"
        self._images = variable((batch, *network["input_shape"]), dtype)
        self._labels = T.lvector("labels")
        self._functions = {}
        self._outputs = self._forward(True)
        self._loss = mean_loss(self._outputs[network["layers"][-1]["name"]], self._labels)
        self._gradients = T.grad(self._loss, list(self._weights.values()))
        self._step = theano.function([self._images, self._labels], self._loss, updates=self._updates(self._gradients))

    def step(self, images, labels):
        return float(self._step(images, labels))

    def phases(self, images, labels):
        """Of functions compiled apart, run one after the other on this batch: the loss, loss and gradients, the update.

        backward = (loss and gradients) - loss, 0 where noise makes it negative. h2d is 0: a function reads the arrays
        where they are.
        """
        forward = self._once("forward", lambda: self._loss)
        both = self._once("both", lambda: [self._loss, *self._borrowed(self._gradients)])
        if "update" not in self._functions:
            symbols = [weight.type() for weight in self._weights.values()]
            self._functions["update"] = theano.function(symbols, updates=self._updates(symbols))
        start = time.perf_counter()
        forward(images, labels)
        half = time.perf_counter()
        gradients = both(images, labels)[1:]
        end = time.perf_counter()
        self._functions["update"](*gradients)
        updated = time.perf_counter()
        backward_s = max(0.0, (end - half) - (half - start))
        return {"h2d": 0.0, "forward": half - start, "backward": backward_s, "update": updated - end}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter name: gradient in our layout}).

        A layer on its own is a function of its own, and pays for a call and for what Theano would have joined with
        its neighbours: forward is its call less a call that does nothing, backward its (forward + backward) less its
        forward; 0 where noise makes it negative.
        """
        layers = self._network["layers"]
        outputs, trained, runs = {"input": images}, {"input": False}, []
        for layer, run in zip(layers, self._operations):
            sources = layer["inputs"]
            inputs = [outputs[source] for source in sources]
            names = [parameter["name"] for parameter in layer["parameters"]]
            weights = [self._weights[name].get_value(borrow=True) for name in names]
            wanted = [number for number, source in enumerate(sources) if trained[source]]
            forward, both, nothing = self._layer_functions(layer, wanted, run, inputs, weights)
            start = time.perf_counter()
            nothing(*(inputs + weights))
            called = time.perf_counter()
            outputs[layer["name"]] = forward(*(inputs + weights))
            end = time.perf_counter()
            trained[layer["name"]] = bool(wanted or weights)
            runs.append((layer, names, wanted, inputs + weights, both, end - called, called - start))
        last = layers[-1]["name"]
        upstream, times, found = {last: self._loss_gradient(outputs[last], labels)}, [], {}
        for layer, names, wanted, values, both, forward_s, call_s in reversed(runs):
            backward_s = 0.0
            if trained[layer["name"]]:
                above = upstream.pop(layer["name"])
                start = time.perf_counter()
                gradients = both(above, *values)[1:]
                backward_s = max(0.0, time.perf_counter() - start - forward_s)
                start = time.perf_counter()
                for number, gradient in zip(wanted, gradients):
                    source = layer["inputs"][number]
                    upstream[source] = upstream[source] + gradient if source in upstream else gradient
                backward_s += time.perf_counter() - start
                found.update(zip(names, gradients[len(wanted) :]))
            times.append({"layer": layer["name"], "forward_s": max(0.0, forward_s - call_s), "backward_s": backward_s})
        return times[::-1], found

    def gradients(self, images, labels):
        def evaluation():
            outputs = self._forward(False)[self._network["layers"][-1]["name"]]
            loss = mean_loss(outputs, self._labels)
            return [outputs, loss, *T.grad(loss, list(self._weights.values()))]

        outputs, loss, *gradients = self._once("evaluation", evaluation)(images, labels)
        return dict(self.arrays(dict(zip(self._weights, gradients))), outputs=outputs, loss=loss)

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of arrays in our layout."""
        return {name: values.T if name in self._transposed else values for name, values in tensors.items()}

    def flops(self, images, labels):
        """Theano counts those of a few operations in its profiles, products of matrices not among them."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        """As Theano infers them from the input's."""
        names = [layer["name"] for layer in self._network["layers"]]
        # Nothing is left to compute, and so to compile.
        mode = theano.Mode(linker="py", optimizer="fast_run")
        expressions = [self._outputs[name].shape[1:] for name in names]
        found = theano.function([self._images], expressions, mode=mode, on_unused_input="ignore")(images)
        return {name: [int(length) for length in shape] for name, shape in zip(names, found)}

    def parameter_count(self):
        return int(sum(weight.get_value(borrow=True).size for weight in self._weights.values()))

    def device_peak_bytes(self):
        return None

    def _forward(self, training):
        """{layer: its symbolic output}."""
        outputs = {"input": self._images}
        for layer, run in zip(self._network["layers"], self._operations):
            weights = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            outputs[layer["name"]] = run([outputs[source] for source in layer["inputs"]], weights, training)
        return outputs

    def _updates(self, gradients):
        return [(weight, weight - self._learning_rate * g) for weight, g in zip(self._weights.values(), gradients)]

    def _layer_functions(self, layer, wanted, run, inputs, weights):
        """(forward, forward + backward, nothing) of one layer; the second returns the output, too, so it is computed.

        Layers alike share them, since compiling takes longer than running.
        """
        key = json.dumps([layer["kind"], layer["settings"], layer["in_shapes"], wanted], sort_keys=True)
        if key not in self._functions:
            symbols = [variable(value.shape, str(value.dtype)) for value in inputs + weights]
            output = run(symbols[: len(inputs)], symbols[len(inputs) :], True)
            forward = theano.function(symbols, theano.Out(output, borrow=True))
            nothing, both = theano.function(symbols, [], on_unused_input="ignore"), None
            if wanted or weights:
                above = variable((self._batch, *layer["out_shape"]))
                targets = [symbols[number] for number in wanted] + symbols[len(inputs) :]
                gradients = T.grad(None, targets, known_grads={output: above}, disconnected_inputs="ignore")
                both = theano.function(
                    [above, *symbols], self._borrowed([output, *gradients]), on_unused_input="ignore"
                )
            self._functions[key] = forward, both, nothing
        return self._functions[key]

    def _loss_gradient(self, outputs, labels):
        if "loss" not in self._functions:
            symbol = variable(outputs.shape)
            gradient = T.grad(mean_loss(symbol, self._labels), symbol)
            self._functions["loss"] = theano.function([symbol, self._labels], gradient)
        return self._functions["loss"](outputs, labels)

    def _once(self, name, expressions):
        """The function of that name, compiled the first time it is asked for."""
        if name not in self._functions:
            self._functions[name] = theano.function([self._images, self._labels], expressions())
        return self._functions[name]

    @staticmethod
    def _borrowed(tensors):
        """Outputs that are handed out without a copy."""
        return [theano.Out(tensor, borrow=True) for tensor in tensors]
