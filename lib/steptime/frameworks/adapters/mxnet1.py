"""MXNet 1: one symbol for the network, bound once, then run by its graph executor. See adapters/__init__.py.

This is what `mx.mod.Module` does on one device (executor and `Updater`), without its copies for several of them.

Threads: operations are run one after the other by the engine's one CPU worker (MXNET_CPU_WORKER_NTHREADS = 1), inside
which oneDNN and OpenBLAS use OMP_NUM_THREADS. Python's own thread hands them over and then sleeps until they are done.
"""

import os
import re
import time

# The engine's default, pinned: a second worker would run two operations at once, on two cores.
os.environ["MXNET_CPU_WORKER_NTHREADS"] = "1"

import mxnet as mx
import numpy as np

CHANNELS_LAST = False
LOWEST = float(np.finfo(np.float32).min)
EMPTY_CALLS = 5
CHAIN, CHAINS = 100, 15


def versions():
    return {"framework": mx.__version__, "blas": "oneDNN %s, %s" % (onednn_version(), openblas_version())}


def onednn_version():
    """The version that the package's headers name: the library does not export it."""
    path = os.path.join(os.path.dirname(mx.__file__), "include", "mkldnn", "oneapi", "dnnl", "dnnl_version.h")
    try:
        with open(path) as file:
            numbers = re.findall(r"define DNNL_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", file.read())
    except OSError:
        numbers = []
    return ".".join(numbers) or "of unknown version"


def openblas_version():
    import ctypes

    try:
        config = mx.base._LIB.openblas_get_config
    except AttributeError:
        return "unknown BLAS"
    config.restype = ctypes.c_char_p
    return " ".join(config().decode().split()[:2])


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    """Threads are OMP_NUM_THREADS, which is read when MXNet is loaded."""
    if device != "cpu":
        raise NotImplementedError("device = %r: this MXNet is a CPU build" % device)
    mx.random.seed(seed)
    np.random.seed(seed)
    return Trainer(network, weights, batch, learning_rate)


def convention(layer):
    """MXNet's name for the way of rounding that gives the described pooling, or None if the edges are too uneven.

    It pads begin and end alike, and rounds the number of windows down ("valid") or up ("full").
    """
    s = layer["settings"]
    fits = {"valid", "full"}
    for begin, kernel, stride, length, wanted in zip(
        (s["pad"][0], s["pad"][2]), s["kernel"], s["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        free = length + 2 * begin - kernel
        counts = {"valid": free // stride + 1, "full": -(-free // stride) + 1}
        fits &= {name for name, count in counts.items() if count == wanted and 2 * begin <= kernel}
    return max(fits) if fits else None


def padded(x, pad, value=0.0):
    top, bottom, left, right = pad
    edges = (0, 0, 0, 0, top, bottom, left, right)
    return mx.sym.pad(x, mode="constant", pad_width=edges, constant_value=value)


def convolution(x, w, s):
    top, bottom, left, right = s["pad"]
    pad = (top, left)
    if (top, left) != (bottom, right):
        x, pad = padded(x, s["pad"]), (0, 0)
    tensors = dict(zip(("weight", "bias"), w))
    return mx.sym.Convolution(
        x,
        no_bias=not s["bias"],
        kernel=s["kernel"],
        stride=s["stride"],
        pad=pad,
        num_filter=s["out_channels"],
        num_group=s["groups"],
        **tensors,
    )


def max_pool(x, layer):
    s, rounding = layer["settings"], convention(layer)
    pad = (s["pad"][0], s["pad"][2])
    if rounding is None:
        x, pad, rounding = padded(x, s["pad"], LOWEST), (0, 0), "valid"
    shape = {"kernel": s["kernel"], "stride": s["stride"], "pad": pad}
    return mx.sym.Pooling(x, pool_type="max", pooling_convention=rounding, **shape)


def avg_pool(x, s):
    top, bottom, left, right = s["pad"]
    pad = (top, left)
    if (top, left) != (bottom, right):
        x, pad = padded(x, s["pad"]), (0, 0)
    return mx.sym.Pooling(x, kernel=s["kernel"], stride=s["stride"], pad=pad, pool_type="avg", count_include_pad=True)


def lstm(x, w, layer, batch):
    """The fused operation: time first, its gates in the description's order, all parameters in one row."""
    hidden = layer["out_shape"][1]
    rows = [tensor.reshape((-1,)) for tensor in w] + [mx.sym.zeros((4 * hidden,))]
    state, cell = mx.sym.zeros((1, batch, hidden)), mx.sym.zeros((1, batch, hidden))
    y = mx.sym.RNN(
        mx.sym.swapaxes(x, 0, 1), mx.sym.concat(*rows, dim=0), state, cell, mode="lstm", state_size=hidden, num_layers=1
    )
    return mx.sym.swapaxes(y, 0, 1)


def attention(x, w, layer, batch):
    steps, features = layer["out_shape"]
    heads = layer["settings"]["heads"]
    size = features // heads
    y = mx.sym.FullyConnected(x, weight=w[0], bias=w[1], num_hidden=3 * features, flatten=False)
    y = y.reshape((batch, steps, 3, heads, size)).transpose((2, 0, 3, 1, 4)).reshape((3, batch * heads, steps, size))
    q, k, v = mx.sym.split(y, num_outputs=3, axis=0, squeeze_axis=True)
    shares = mx.sym.softmax(mx.sym.batch_dot(q * (size**-0.5), k, transpose_b=True), axis=-1)
    y = mx.sym.batch_dot(shares, v).reshape((batch, heads, steps, size)).transpose((0, 2, 1, 3))
    y = y.reshape((batch, steps, features))
    return mx.sym.FullyConnected(y, weight=w[2], bias=w[3], num_hidden=features, flatten=False)


def dense(x, w, features, **settings):
    tensors = dict(zip(("weight", "bias"), w))
    return mx.sym.FullyConnected(x, no_bias=len(w) == 1, num_hidden=features, **dict(tensors, **settings))


def symbol_of(layer, x, w, batch, training):
    """The symbol of one layer; x and w are the symbols of its inputs and parameters."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        return convolution(x[0], w, s)
    if kind == "dense":
        return dense(x[0], w, layer["out_shape"][0])
    if kind == "token_dense":
        return dense(x[0], w, layer["out_shape"][1], flatten=False)
    if kind in ("relu", "sigmoid"):
        return mx.sym.Activation(x[0], act_type=kind)
    if kind == "gelu":
        return mx.sym.LeakyReLU(x[0], act_type="gelu")
    if kind == "max_pool":
        return max_pool(x[0], layer)
    if kind == "avg_pool":
        return avg_pool(x[0], s)
    if kind == "global_avg_pool":
        return mx.sym.flatten(mx.sym.Pooling(x[0], global_pool=True, pool_type="avg", kernel=(1, 1)))
    if kind == "lrn":
        # Here, too, alpha is divided by size.
        return mx.sym.LRN(x[0], nsize=s["size"], alpha=s["alpha"], beta=s["beta"], knorm=s["k"])
    if kind == "dropout":
        return mx.sym.Dropout(x[0], p=s["rate"]) if training else mx.sym.identity(x[0])
    if kind == "batch_norm":
        return mx.sym.BatchNorm(x[0], gamma=w[0], beta=w[1], eps=s["epsilon"], fix_gamma=False)
    if kind == "layer_norm":
        return mx.sym.LayerNorm(x[0], gamma=w[0], beta=w[1], axis=-1, eps=s["epsilon"])
    if kind == "add":
        return mx.sym.add_n(*x)
    if kind == "concat":
        return mx.sym.concat(*x, dim=1)
    if kind == "flatten":
        return mx.sym.flatten(x[0])
    if kind == "embedding":
        vocabulary, features = layer["parameters"][0]["shape"]
        return mx.sym.Embedding(x[0], weight=w[0], input_dim=vocabulary, output_dim=features)
    if kind == "position":
        return mx.sym.broadcast_add(x[0], w[0].expand_dims(0))
    if kind == "lstm":
        return lstm(x[0], w, layer, batch)
    if kind == "last":
        return mx.sym.squeeze(mx.sym.slice_axis(x[0], axis=1, begin=-1, end=None), axis=1)
    if kind == "mean_steps":
        return mx.sym.mean(x[0], axis=1)
    if kind == "attention":
        return attention(x[0], w, layer, batch)
    raise NotImplementedError("layer %s: kind %r is unknown" % (layer["name"], kind))


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate):
        self._network = network
        self._batch = batch
        vocabulary = network["vocabulary"]
        self._input = mx.nd.zeros((batch, *network["input_shape"]), dtype="int64" if vocabulary else "float32")
        self._labels = mx.nd.zeros((batch,))
        self._weights = {name: mx.nd.array(values) for name, values in weights.items()}
        self._gradients = {name: mx.nd.zeros(values.shape) for name, values in weights.items()}
        outputs = self._symbols(True)[network["layers"][-1]["name"]]
        self._executor = self._bound(with_loss(outputs), self._gradients)
        self._updater = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=learning_rate, wd=0.0))
        self._alone = self._watched = None

    def step(self, images, labels):
        self._load(images, labels)
        self._executor.forward(is_train=True)
        self._executor.backward()
        self._update()
        chances = self._executor.outputs[0].asnumpy()
        mx.nd.waitall()
        return -float(np.log(np.maximum(chances[np.arange(self._batch), labels], 1e-30)).mean())

    def phases(self, images, labels):
        times = [self._now()]
        self._load(images, labels)
        times.append(self._now())
        self._executor.forward(is_train=True)
        times.append(self._now())
        self._executor.backward()
        times.append(self._now())
        self._update()
        times.append(self._now())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

    def profiled_step(self, images, labels):
        """A whole step of an executor that reports each operation once it is done, instead of running many at once.

        What a report costs is measured apart and taken off each operation.
        """
        if self._watched is None:
            outputs = self._symbols(True)[self._network["layers"][-1]["name"]]
            self._watched = Watched(self._bound(with_loss(outputs), self._gradients), seconds_of_a_report())
        start = self._now()
        self._load(images, labels)
        copied = self._now()
        forward, backward, dispatch_s = self._watched.run()
        ran = self._now()
        self._update()
        self._watched.executor.outputs[0].asnumpy()
        update_s = self._now() - ran
        names = [layer["name"] for layer in self._network["layers"]]
        layers = [
            {"layer": name, "forward_s": forward.pop(name, 0.0), "backward_s": backward.pop(name, 0.0)}
            for name in names
        ]
        parts = {"h2d": copied - start, "loss": forward.pop("loss") + backward.pop("loss"), "update": update_s}
        other_s = sum(forward.values()) + sum(backward.values())
        return {"layers": layers, "parts": dict(parts, dispatch=dispatch_s, other=other_s)}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient}): every layer is a graph of its own, bound to its inputs' arrays.

        A layer on its own pays for a call and a hand-over to the engine's thread that the whole graph does not wait
        for: the least that a call that does nothing took is taken off, 0 where noise makes that negative.
        """
        if self._alone is None:
            self._alone = LayerGraphs(self)
        return self._alone.run(images, labels)

    def gradients(self, images, labels):
        self._load(images, labels)
        gradients = {name: mx.nd.zeros(values.shape) for name, values in self._weights.items()}
        outputs = self._symbols(False)[self._network["layers"][-1]["name"]]
        executor = self._bound(mx.sym.Group([with_loss(outputs), mx.sym.BlockGrad(outputs)]), gradients)
        executor.forward(is_train=True)
        executor.backward()
        values = executor.outputs[1].asnumpy()
        shifted = values - values.max(1, keepdims=True)
        chosen = shifted[np.arange(self._batch), labels] - np.log(np.exp(shifted).sum(1))
        return dict(self.arrays(gradients), outputs=values, loss=-chosen.mean())

    def arrays(self, tensors):
        """{parameter: array} of tensors."""
        return {name: tensor.asnumpy() for name, tensor in tensors.items()}

    def flops(self, images, labels):
        """MXNet has no counter."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        symbols = self._symbols(True)
        _, shapes, _ = mx.sym.Group(list(symbols.values())).infer_shape(input=self._input.shape)
        return {name: list(shape[1:]) for name, shape in zip(symbols, shapes)}

    def parameter_count(self):
        return sum(tensor.size for tensor in self._weights.values())

    def device_peak_bytes(self):
        return None

    def _symbols(self, training):
        """{layer name: symbol}. Without `training` the dropout is left out."""
        symbols = {"input": mx.sym.Variable("input")}
        parameters = {name: mx.sym.Variable(name, shape=array.shape) for name, array in self._weights.items()}
        for layer in self._network["layers"]:
            inputs = [symbols[source] for source in layer["inputs"]]
            tensors = [parameters[parameter["name"]] for parameter in layer["parameters"]]
            # Operations are named LAYER:operation, which tells a profiled step whose they are.
            with mx.name.Prefix(layer["name"] + ":"):
                symbols[layer["name"]] = symbol_of(layer, inputs, tensors, self._batch, training)
        del symbols["input"]
        return symbols

    def _bound(self, symbol, gradients):
        return bound(symbol, dict(self._weights, input=self._input, labels=self._labels), gradients)

    def _load(self, images, labels):
        self._input[:] = images
        self._labels[:] = labels

    def _update(self):
        self._updater(list(range(len(self._weights))), list(self._gradients.values()), list(self._weights.values()))

    def _now(self):
        mx.nd.waitall()
        return time.perf_counter()


class Watched(object):
    """An executor whose operations are awaited and timed one by one, in the graph's order."""

    def __init__(self, executor, report_s=0.0):
        self.executor, self._report_s = executor, report_s
        self._operation, self._left, self._stretches = None, 0.0, []
        executor.set_monitor_callback(self._report)

    def run(self):
        """({owner: forward seconds}, {owner: backward seconds}, seconds after the last operation).

        Owners are layers, "loss" and, for the copies of a gradient that goes two ways, None.
        """
        forward, forward_end_s = self._timed(lambda: self.executor.forward(is_train=True))
        backward, backward_end_s = self._timed(self.executor.backward)
        return forward, backward, forward_end_s + backward_end_s

    def _timed(self, run):
        self._operation, self._stretches, self._left = None, [], time.perf_counter()
        run()
        mx.nd.waitall()
        end_s = time.perf_counter() - self._left
        found, waiting_s = {}, 0.0
        for (owner, operation), seconds in self._stretches:
            seconds = max(0.0, seconds - self._report_s)
            if operation == "sum":
                # Of an output that feeds several: its layer's operation comes next.
                waiting_s += seconds
                continue
            found[owner] = found.get(owner, 0.0) + seconds + waiting_s
            waiting_s = 0.0
        return found, end_s

    def _report(self, name, output):
        """Called with each output of an operation that has been handed over; the first one awaits it."""
        mx.nd.waitall()
        now = time.perf_counter()
        operation = owner_and_operation(name if isinstance(name, str) else name.decode())
        if operation != self._operation or operation[0] is None:
            self._stretches.append((operation, now - self._left))
        self._operation, self._left = operation, time.perf_counter()


def owner_and_operation(name):
    """Of an output's name: (layer, operation), ("loss", …), (None, "sum" or "copy")."""
    layer, colon, rest = name.partition(":")
    words = (rest if colon else name).split("_")
    if colon or words[0] == "loss":
        return layer if colon else "loss", (words[0], "backward" in words)
    return None, words[0] if words[0] == "sum" else "copy"


def seconds_of_a_report():
    """What a report adds to an operation: a chain of operations on one number, with and without."""
    symbol = mx.sym.Variable("x")
    for number in range(CHAIN):
        symbol = mx.sym.negative(symbol, name="layer:negative%d" % number)
    arrays = {"x": mx.nd.zeros((1,))}
    plain, watched = bound(symbol, arrays, {}), Watched(bound(symbol, arrays, {}))
    differences = []
    for _ in range(CHAINS):
        mx.nd.waitall()
        start = time.perf_counter()
        plain.forward(is_train=True)
        mx.nd.waitall()
        plain_s = time.perf_counter() - start
        found, _ = watched._timed(lambda: watched.executor.forward(is_train=True))
        differences.append((found["layer"] - plain_s) / CHAIN)
    return max(0.0, float(np.median(differences)))


class LayerGraphs(object):
    """One executor a layer. Inputs are the arrays that the layers before write, so nothing is copied between them."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._layers = []
        arrays, trained = {"input": trainer._input}, {"input": False}
        self._gradients = {name: mx.nd.zeros(values.shape) for name, values in trainer._weights.items()}
        for layer in trainer._network["layers"]:
            names = ["input%d" % number for number in range(len(layer["inputs"]))]
            parameters = [parameter["name"] for parameter in layer["parameters"]]
            variables = [mx.sym.Variable(name) for name in names + parameters]
            symbol = symbol_of(layer, variables[: len(names)], variables[len(names) :], trainer._batch, True)
            inputs = dict(zip(names, (arrays[source] for source in layer["inputs"])))
            gradients = {name: self._gradients[name] for name in parameters}
            wanted = {name: source for name, source in zip(names, layer["inputs"]) if trained[source]}
            gradients.update((name, mx.nd.zeros(inputs[name].shape)) for name in wanted)
            inputs.update((name, trainer._weights[name]) for name in parameters)
            executor = bound(symbol, inputs, gradients)
            arrays[layer["name"]] = executor.outputs[0]
            trained[layer["name"]] = bool(gradients)
            self._layers.append((layer["name"], executor, wanted, gradients))
        self._last = layer["name"]
        self._outputs = arrays[self._last]
        above = mx.sym.Variable("outputs")
        self._loss_gradient = mx.nd.zeros(self._outputs.shape)
        arguments = {"outputs": self._outputs, "labels": trainer._labels}
        self._loss = bound(with_loss(above), arguments, {"outputs": self._loss_gradient})
        self._nothing = bound(mx.sym.identity(mx.sym.Variable("x")), {"x": mx.nd.zeros((1,))}, {})

    def run(self, images, labels):
        """(layer times, {parameter: gradient})."""
        now = self._trainer._now
        self._trainer._load(images, labels)
        call_s = self._call_s()
        forwards = []
        for _, executor, _, _ in self._layers:
            start = now()
            executor.forward(is_train=True)
            forwards.append(now() - start)
        self._loss.forward(is_train=True)
        self._loss.backward()
        upstream, times = {self._last: self._loss_gradient}, []
        for (name, executor, wanted, gradients), forward_s in list(zip(self._layers, forwards))[::-1]:
            start = now()
            backward_s = 0.0
            if gradients:
                executor.backward([upstream.pop(name)])
                for variable, source in wanted.items():
                    found = gradients[variable]
                    upstream[source] = upstream[source] + found if source in upstream else found
                backward_s = max(0.0, now() - start - call_s)
            times.append({"layer": name, "forward_s": max(0.0, forward_s - call_s), "backward_s": backward_s})
        return times[::-1], self._gradients

    def _call_s(self):
        """Seconds of a call that does nothing, the least of a few: no disturbance is taken off."""
        now, seconds = self._trainer._now, []
        for _ in range(EMPTY_CALLS):
            start = now()
            self._nothing.forward(is_train=True)
            seconds.append(now() - start)
        return min(seconds)


def bound(symbol, arrays, gradients):
    """The executor of a symbol that reads those of `arrays` that it needs and writes `gradients`."""
    arguments = {name: arrays[name] for name in symbol.list_arguments()}
    requests = {name: "write" if name in gradients else "null" for name in arguments}
    _, _, states = symbol.infer_shape(**{name: array.shape for name, array in arguments.items()})
    running = {name: mx.nd.zeros(shape) for name, shape in zip(symbol.list_auxiliary_states(), states)}
    return symbol.bind(mx.cpu(), arguments, args_grad=gradients, grad_req=requests, aux_states=running)


def with_loss(outputs):
    """Softmax whose backward is the gradient of the mean cross-entropy."""
    return mx.sym.SoftmaxOutput(outputs, mx.sym.Variable("labels"), normalization="batch", name="loss")
