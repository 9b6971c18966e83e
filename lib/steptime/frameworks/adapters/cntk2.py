"""CNTK 2: one graph of `cntk` operations, trained by its Trainer with its SGD learner. See adapters/__init__.py.

Threads: MKL-ML uses OMP_NUM_THREADS, CNTK's own loops what `set_max_num_cputhreads` says; both are the setting's. Its
OpenMP starts one more all the same, which spins through the whole step: OMP_THREAD_LIMIT keeps it from that.

Its MKL of 2018 runs generic kernels on processors that are not Intel's: convolutions a third as fast on an AMD EPYC.
There its AVX2 kernels are asked for, as the papers' Intel processors got, unless MKL_DEBUG_CPU_TYPE is set already.

Dense weights are (in, out) inside, as in `cntk.layers.Dense`. Tokens are float32 numbers, exact far beyond
any vocabulary here. There is no error function: GELU's is Abramowitz & Stegun's 7.1.26, exact to 1.5e-7.
"""

import glob
import os
import time


def asks_for_avx2():
    """Whether this processor has AVX2 but is not one for which this MKL would use it by itself."""
    with open("/proc/cpuinfo") as file:
        about = file.read()
    return "GenuineIntel" not in about and " avx2 " in about


# Read by OpenMP and MKL when they are first used.
os.environ["OMP_THREAD_LIMIT"] = os.environ.get("OMP_NUM_THREADS", "1")
if asks_for_avx2():
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")

import cntk as C  # noqa: E402
import numpy as np  # noqa: E402

CHANNELS_LAST = False
LOWEST = float(np.finfo(np.float32).min)
EMPTY_CALLS = 5


def versions():
    folder = os.path.join(os.path.dirname(C.__file__), "libs")
    mkl = glob.glob(os.path.join(folder, "libmklml*.so"))
    return {"framework": C.__version__, "blas": mkl_version(mkl[0]) if mkl else "unknown"}


def mkl_version(library):
    import ctypes

    text = ctypes.create_string_buffer(200)
    try:
        ctypes.CDLL(library).MKL_Get_Version_String(text, len(text))
    except (OSError, AttributeError):
        return "MKL-ML"
    kernels = "".join(", MKL_DEBUG_CPU_TYPE=" + value for value in [os.environ.get("MKL_DEBUG_CPU_TYPE")] if value)
    return "MKL-ML (%s)%s" % (text.value.decode().strip(), kernels)


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %r: this CNTK is a CPU build" % device)
    C.device.try_set_default_device(C.cpu())
    C.cntk_py.set_max_num_cputhreads(threads)
    C.cntk_py.set_fixed_random_seed(seed)
    return Trainer(network, weights, batch, learning_rate)


def automatic(layer, rounded_up=False):
    """For height and width: whether CNTK's automatic padding is the described one, or None if neither it nor none is.

    It begins (kernel - 1) // 2 before the edge, with a window for each stride inside; no kernel may exceed the input.
    """
    s, found = layer["settings"], []
    for begin, kernel, stride, length, wanted in zip(
        (s["pad"][0], s["pad"][2]), s["kernel"], s["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        free = length - kernel
        if free < 0:
            return None
        if begin == 0 and wanted == (-(-free // stride) if rounded_up else free // stride) + 1:
            found.append(False)
        elif begin == (kernel - 1) // 2 and wanted == (length - 1) // stride + 1:
            found.append(True)
        else:
            return None
    return found


def padded(x, pad, value=0.0):
    top, bottom, left, right = pad
    return C.pad(x, [(0, 0), (top, bottom), (left, right)], C.CONSTANT_PAD, value)


def convolution(x, w, layer):
    s, padding = layer["settings"], automatic(layer)
    if padding is None:
        x, padding = padded(x, s["pad"]), [False, False]
    y = C.convolution(w[0], x, strides=tuple(s["stride"]), auto_padding=[False, *padding], groups=s["groups"])
    return y + C.reshape(w[1], (-1, 1, 1)) if s["bias"] else y


def pool(x, layer, kind, value, **settings):
    """Pooling of x, of a copy padded with `value` where the edges are too uneven."""
    s, padding, rounded_up = layer["settings"], automatic(layer), False
    if padding is None and kind == C.MAX_POOLING:
        padding, rounded_up = automatic(layer, True), True
    if padding is None:
        x, padding, rounded_up = padded(x, s["pad"], value), [False, False], False
    kernel, stride = tuple(s["kernel"]), tuple(s["stride"])
    return C.pooling(x, kind, kernel, stride, [False, *padding], ceil_out_dim=rounded_up, **settings)


def batch_norm(x, w, layer):
    """Running statistics are kept, as `cntk.layers.BatchNormalization` does: CNTK has no other way. None is read."""
    shape = (layer["out_shape"][0],)
    mean, variance, count = C.constant(0, shape), C.constant(0, shape), C.constant(0, ())
    return C.batch_normalization(
        x,
        w[0],
        w[1],
        mean,
        variance,
        len(layer["out_shape"]) == 3,
        normalization_time_constant=5000,
        epsilon=layer["settings"]["epsilon"],
        use_cudnn_engine=False,
        running_count=count,
    )


def lstm(x, w, layer):
    """A loop over a sequence, as `cntk.layers.Recurrence` makes it; the products with the inputs stay outside of it."""
    steps, hidden = layer["out_shape"]
    inputs = C.times(C.to_sequence(x), w[0]) + w[2]
    output, cell = C.placeholder((hidden,)), C.placeholder((hidden,))
    gates = inputs + C.times(C.sequence.past_value(output), w[1])
    i, f, g, o = [C.slice(gates, 0, number * hidden, (number + 1) * hidden) for number in range(4)]
    new_cell = C.sigmoid(f) * C.sequence.past_value(cell) + C.sigmoid(i) * C.tanh(g)
    new_output = C.sigmoid(o) * C.tanh(new_cell)
    new_output.replace_placeholders({output: new_output.output, cell: new_cell.output})
    return C.reshape(C.sequence.unpack(new_output, 0, no_mask_output=True), (steps, hidden))


def attention(x, w, layer):
    """Head by head: a product of two matrices that both depend on the sample has no further axis."""
    features, heads = layer["out_shape"][1], layer["settings"]["heads"]
    size = features // heads
    y = C.times(x, w[0]) + w[1]
    found = []
    for head in range(heads):
        begins = [part * features + head * size for part in range(3)]
        q, k, v = [C.slice(y, 1, begin, begin + size) for begin in begins]
        shares = C.softmax(C.times_transpose(q * size**-0.5, k), axis=1)
        found.append(C.times(shares, v))
    return C.times(C.splice(*found, axis=1), w[2]) + w[3]


def layer_norm(x, w, epsilon):
    """Composed, as `cntk.layers.LayerNormalization` is; that one adds epsilon outside the root."""
    centred = x - C.reduce_mean(x, axis=1)
    variance = C.reduce_mean(C.square(centred), axis=1)
    return centred / C.sqrt(variance + epsilon) * w[0] + w[1]


def gelu(x):
    """x (1 + erf(x / sqrt 2)) / 2, with erf of Abramowitz & Stegun 1964, formula 7.1.26."""
    size = C.abs(x) * 0.5**0.5
    t = C.reciprocal(1 + 0.3275911 * size)
    sum_ = 1.061405429
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        sum_ = sum_ * t + factor
    rest = sum_ * t * C.exp(-size * size)
    # erf is odd: x erf(x) is |x| erf(|x|)
    return 0.5 * (x + C.abs(x) * (1 - rest))


def function_of(layer, x, w, training):
    """The CNTK function of one layer of inputs x and parameters w."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        return convolution(x[0], w, layer)
    if kind in ("dense", "token_dense"):
        y = C.times(x[0], w[0])
        return y + w[1] if len(w) > 1 else y
    if kind == "relu":
        return C.relu(x[0])
    if kind == "sigmoid":
        return C.sigmoid(x[0])
    if kind == "gelu":
        return gelu(x[0])
    if kind == "max_pool":
        return pool(x[0], layer, C.MAX_POOLING, LOWEST)
    if kind == "avg_pool":
        return pool(x[0], layer, C.AVG_POOLING, 0.0, include_pad=True)
    if kind == "global_avg_pool":
        height, width = layer["in_shapes"][0][1:]
        return C.reshape(C.pooling(x[0], C.AVG_POOLING, (height, width), (1, 1), [False] * 3), (-1,))
    if kind == "lrn":
        # Here, too, alpha is divided by size, whatever the function's documentation says.
        return C.local_response_normalization(x[0], s["size"] // 2, s["k"], s["alpha"], s["beta"])
    if kind == "dropout":
        return C.dropout(x[0], s["rate"]) if training else C.alias(x[0])
    if kind == "batch_norm":
        return batch_norm(x[0], w, layer)
    if kind == "layer_norm":
        return layer_norm(x[0], w, s["epsilon"])
    if kind == "add":
        return sum(x[1:], x[0])
    if kind == "concat":
        return C.splice(*x, axis=0)
    if kind == "flatten":
        return C.reshape(x[0], (-1,))
    if kind == "embedding":
        return C.gather(w[0], x[0])
    if kind == "position":
        return x[0] + w[0]
    if kind == "lstm":
        return lstm(x[0], w, layer)
    if kind == "last":
        return C.reshape(C.slice(x[0], 0, -1, 0), (-1,))
    if kind == "mean_steps":
        return C.reshape(C.reduce_mean(x[0], axis=0), (-1,))
    if kind == "attention":
        return attention(x[0], w, layer)
    raise NotImplementedError("layer %s: kind %r is unknown" % (layer["name"], kind))


def transposed(network):
    """Names of the parameters that are (in, out) here and (out, in) in the description."""
    kinds = ("dense", "token_dense", "lstm", "attention")
    layers = [layer for layer in network["layers"] if layer["kind"] in kinds]
    return {p["name"] for layer in layers for p in layer["parameters"] if len(p["shape"]) == 2}


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate):
        self._network = network
        self._batch = batch
        self._transposed = transposed(network)
        self._weights = {name: C.parameter(init=self._ours(name, values)) for name, values in weights.items()}
        self._input = C.input_variable(tuple(network["input_shape"]))
        self._labels = C.input_variable((network["classes"],))
        self._outputs, self._functions = self._built(True)
        self._loss = C.cross_entropy_with_softmax(self._outputs, self._labels)
        schedule = C.learning_parameter_schedule(learning_rate, minibatch_size=batch)
        self._learner = C.sgd(list(self._weights.values()), schedule)
        self._trainer = C.Trainer(self._outputs, (self._loss, None), [self._learner])
        self._one_hot = np.eye(network["classes"], dtype=np.float32)
        ones = np.ones((batch, 1), np.float32)
        self._sum_root, self._mean_root = C.Value(batch=ones), C.Value(batch=ones / batch)
        self._alone = None

    def step(self, images, labels):
        self._trainer.train_minibatch(self._to_device(images, labels))
        return self._trainer.previous_minibatch_loss_average

    def phases(self, images, labels):
        """The three calls that train_minibatch makes, each on its own. CNTK's gradient is the sum of the samples'."""
        times = [time.perf_counter()]
        arguments = self._to_device(images, labels)
        times.append(time.perf_counter())
        state, _ = forward(self._loss, arguments)
        times.append(time.perf_counter())
        gradients = self._loss.backward(state, {self._loss.output: self._sum_root}, self._trained(), as_numpy=False)
        times.append(time.perf_counter())
        # Learner.update would take the values through numpy; the Trainer hands them over as they are.
        self._learner._update({parameter: value.data for parameter, value in gradients.items()}, self._batch, False)
        times.append(time.perf_counter())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient in our layout}): every layer is a function of its own.

        A layer on its own pays for a call from Python that it does not pay for inside the network's function: the
        least that the calls of a function that does nothing took is taken off, 0 where noise makes that negative.
        """
        if self._alone is None:
            self._alone = LayerFunctions(self)
        return self._alone.run(images, labels)

    def gradients(self, images, labels):
        outputs, _ = self._built(False)
        loss = C.cross_entropy_with_softmax(outputs, self._labels)
        both = C.combine([loss, outputs])
        wanted = [loss.output, outputs.output]
        state, values = both.forward(self._to_device(images, labels), wanted, {loss.output})
        found = both.backward(state, {loss.output: self._mean_root}, self._trained())
        gradients = {name: found[parameter] for name, parameter in self._weights.items()}
        described = {name: self._described(name, np.asarray(array)) for name, array in gradients.items()}
        return dict(described, outputs=values[outputs.output], loss=np.mean(values[loss.output]))

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of values in our layout."""
        return {name: self._described(name, value.asarray()) for name, value in tensors.items()}

    def flops(self, images, labels):
        """CNTK has no counter."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        return {name: list(function.shape) for name, function in self._functions.items()}

    def parameter_count(self):
        return int(sum(np.prod(parameter.shape) for parameter in self._outputs.parameters))

    def device_peak_bytes(self):
        return None

    def _built(self, training):
        """(the last layer's function, {layer name: function}). Without `training` the dropout is left out."""
        functions = {"input": self._input}
        for layer in self._network["layers"]:
            inputs = [functions[source] for source in layer["inputs"]]
            parameters = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            functions[layer["name"]] = function_of(layer, inputs, parameters, training)
        del functions["input"]
        return functions[layer["name"]], functions

    def _trained(self):
        return set(self._weights.values())

    def _ours(self, name, values):
        return np.ascontiguousarray(values.T) if name in self._transposed else values

    def _described(self, name, values):
        return values.T if name in self._transposed else values

    def _to_device(self, images, labels):
        images = images.astype(np.float32, copy=False)
        return {self._input: C.Value(batch=images), self._labels: C.Value(batch=self._one_hot[labels])}


class LayerFunctions(object):
    """One function a layer, each with inputs of its own and the network's parameters."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._layers, trained = [], {"input": False}
        for layer in trainer._network["layers"]:
            sources = layer["inputs"]
            inputs = [
                C.input_variable(tuple(shape), needs_gradient=trained[source])
                for source, shape in zip(sources, layer["in_shapes"])
            ]
            parameters = [trainer._weights[parameter["name"]] for parameter in layer["parameters"]]
            function = function_of(layer, inputs, parameters, True)
            wanted = [(variable, source) for variable, source in zip(inputs, sources) if trained[source]]
            trained[layer["name"]] = bool(wanted or parameters)
            self._layers.append((layer["name"], function, list(zip(inputs, sources)), wanted, parameters))
        self._last = layer["name"]
        self._outputs = C.input_variable(tuple(layer["out_shape"]), needs_gradient=True)
        self._loss = C.cross_entropy_with_softmax(self._outputs, trainer._labels)
        self._nothing_input = C.input_variable((1,), needs_gradient=True)
        self._nothing = C.alias(self._nothing_input)
        self._one = C.Value(batch=np.ones((trainer._batch, 1), np.float32))

    def run(self, images, labels):
        """(layer times, {parameter: gradient})."""
        arguments = self._trainer._to_device(images, labels)
        values, runs = {"input": arguments[self._trainer._input]}, []
        forward_call_s, backward_call_s = self._call_s()
        for name, function, inputs, wanted, parameters in self._layers:
            start = time.perf_counter()
            state, output = forward(function, {variable: values[source] for variable, source in inputs})
            values[name] = output
            runs.append((name, function, wanted, parameters, state, time.perf_counter() - start))
        labels = arguments[self._trainer._labels]
        state, _ = forward(self._loss, {self._outputs: values[self._last], self._trainer._labels: labels})
        upstream = {self._last: backward(self._loss, state, self._trainer._mean_root, [self._outputs])[self._outputs]}
        times, found = [], {}
        for name, function, wanted, parameters, state, forward_s in reversed(runs):
            backward_s = 0.0
            if wanted or parameters:
                start = time.perf_counter()
                gradients = backward(function, state, upstream.pop(name), [v for v, _ in wanted] + parameters)
                for variable, source in wanted:
                    gradient = gradients[variable]
                    upstream[source] = added(upstream[source], gradient) if source in upstream else gradient
                backward_s = max(0.0, time.perf_counter() - start - backward_call_s)
                found.update((parameter, gradients[parameter]) for parameter in parameters)
            times.append({"layer": name, "forward_s": max(0.0, forward_s - forward_call_s), "backward_s": backward_s})
        return times[::-1], {name: found[parameter] for name, parameter in self._trainer._weights.items()}

    def _call_s(self):
        """Seconds of a forward and a backward call that do nothing, the least of a few: no disturbance is taken off."""
        seconds = []
        for _ in range(EMPTY_CALLS):
            start = time.perf_counter()
            state, _ = forward(self._nothing, {self._nothing_input: self._one})
            between = time.perf_counter()
            backward(self._nothing, state, self._one, [self._nothing_input])
            seconds.append((between - start, time.perf_counter() - between))
        return [min(column) for column in zip(*seconds)]


def forward(function, arguments):
    """(state for backward, value of the output), in training mode. CNTK's calls return when all is computed."""
    state, values = function.forward(arguments, [function.output], {function.output}, as_numpy=False)
    return state, values[function.output]


def backward(function, state, above, variables):
    """{variable: value of its gradient}."""
    return function.backward(state, {function.output: above}, set(variables), as_numpy=False)


def added(a, b):
    """The sum of two values."""
    return C.Value(batch=a.asarray() + b.asarray())
