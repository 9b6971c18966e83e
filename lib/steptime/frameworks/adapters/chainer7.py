"""Chainer 7: one call of chainer.functions a layer, gradients by its tape, its SGD optimizer. See adapters/__init__.py.

On the CPU Chainer is numpy: convolutions and pooling copy every window (im2col) and multiply with numpy's BLAS. Its
faster way, iDeep, exists for Python up to 3.7 only; `versions` says whether it is there, and nothing here uses it.
Threads: numpy's BLAS uses OPENBLAS_NUM_THREADS, everything else runs in one thread.

The rows of an LSTM's weights are ordered unit by unit inside (cell, input, forget, output), as chainer.functions.lstm
wants them.
"""

import contextlib
import ctypes
import glob
import os
import time

import chainer
import chainer.functions as F
import numpy as np

CHANNELS_LAST = False
HOOK_CHAIN, HOOK_CHAINS = 100, 15


def versions():
    from chainer.backends import intel64

    ideep = "with iDeep (not used)" if intel64.is_ideep_available() else "without iDeep"
    return {"framework": chainer.__version__, "blas": "numpy's %s, %s" % (numpys_blas(), ideep)}


def numpys_blas():
    """Name and version of the OpenBLAS in numpy's wheel."""
    folder = os.path.dirname(os.path.dirname(np.__file__))
    for path in glob.glob(os.path.join(folder, "numpy.libs", "libopenblas*")):
        library = ctypes.CDLL(path)
        for name in ("openblas_get_config64_", "openblas_get_config"):
            if hasattr(library, name):
                config = getattr(library, name)
                config.restype = ctypes.c_char_p
                return " ".join(config().decode().split()[:2])
    return "unknown BLAS"


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    """Threads are OPENBLAS_NUM_THREADS, which is read when numpy is loaded."""
    if device != "cpu":
        raise NotImplementedError("device = %r: Chainer's GPU arrays (CuPy) are not installed" % device)
    np.random.seed(seed)
    return Trainer(network, weights, batch, learning_rate)


def padded(x, pad, value=0.0):
    top, bottom, left, right = pad
    edges = ((0, 0), (0, 0), (top, bottom), (left, right))
    return F.pad(x, edges, "constant", constant_values=np.float32(value))


def symmetric(pad):
    """(padding for the operation itself, whether the padding has to be added before it)."""
    top, bottom, left, right = pad
    even = (top, left) == (bottom, right)
    return ((top, left) if even else (0, 0)), not even


def rounding(layer):
    """Whether max pooling rounds the number of windows up (True) or down (False); None: the edges are too uneven."""
    s = layer["settings"]
    fits = {True, False}
    for begin, kernel, stride, length, wanted in zip(
        (s["pad"][0], s["pad"][2]), s["kernel"], s["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        free = length + 2 * begin - kernel
        counts = {True: -(-free // stride) + 1, False: free // stride + 1}
        fits &= {up for up, count in counts.items() if count == wanted}
    return min(fits) if fits else None


def convolution(layer):
    s = layer["settings"]
    pad, before = symmetric(s["pad"])

    def run(x, w, training):
        x = padded(x[0], s["pad"]) if before else x[0]
        return F.convolution_2d(x, w[0], w[1] if s["bias"] else None, s["stride"], pad, groups=s["groups"])

    return run


def max_pool(layer):
    s, up = layer["settings"], rounding(layer)
    begin = (s["pad"][0], s["pad"][2])
    if up is None:
        return lambda x, w, training: F.max_pooling_2d(
            padded(x[0], s["pad"], -np.inf), s["kernel"], s["stride"], cover_all=False
        )
    return lambda x, w, training: F.max_pooling_2d(x[0], s["kernel"], s["stride"], begin, cover_all=up)


def avg_pool(layer):
    s = layer["settings"]
    pad, before = symmetric(s["pad"])
    if before:
        return lambda x, w, training: F.average_pooling_2d(padded(x[0], s["pad"]), s["kernel"], s["stride"])
    return lambda x, w, training: F.average_pooling_2d(x[0], s["kernel"], s["stride"], pad)


def lstm(layer):
    hidden = layer["out_shape"][1]

    def run(x, w, training):
        zeros = np.zeros((x[0].shape[0], hidden), np.float32)
        output, cell, found = chainer.Variable(zeros), chainer.Variable(zeros), []
        # The products with the inputs are one for all steps.
        for inputs in F.separate(F.linear(x[0], w[0], w[2], n_batch_axes=2), axis=1):
            cell, output = F.lstm(cell, inputs + F.linear(output, w[1]))
            found.append(output)
        return F.stack(found, axis=1)

    return run


def layer_norm(layer):
    features, epsilon = layer["out_shape"][1], layer["settings"]["epsilon"]

    def run(x, w, training):
        rows = F.reshape(x[0], (-1, features))
        return F.reshape(F.layer_normalization(rows, w[0], w[1], epsilon), x[0].shape)

    return run


def attention(layer):
    (steps, features), heads = layer["out_shape"], layer["settings"]["heads"]
    size = features // heads

    def run(x, w, training):
        y = F.reshape(F.linear(x[0], w[0], w[1], n_batch_axes=2), (-1, steps, 3, heads, size))
        q, k, v = F.separate(F.transpose(y, (2, 0, 3, 1, 4)), axis=0)
        shares = F.softmax(F.matmul(q * size**-0.5, k, transb=True), axis=3)
        y = F.reshape(F.transpose(F.matmul(shares, v), (0, 2, 1, 3)), (-1, steps, features))
        return F.linear(y, w[2], w[3], n_batch_axes=2)

    return run


def operation(layer):
    """The function (inputs, weights, training) -> output of one layer."""
    kind, s = layer["kind"], layer["settings"]
    made = {
        "conv": convolution,
        "max_pool": max_pool,
        "avg_pool": avg_pool,
        "lstm": lstm,
        "layer_norm": layer_norm,
        "attention": attention,
    }
    if kind in made:
        return made[kind](layer)
    if kind == "dense":
        return lambda x, w, training: F.linear(x[0], *w)
    if kind == "token_dense":
        return lambda x, w, training: F.linear(x[0], *w, n_batch_axes=2)
    if kind == "relu":
        return lambda x, w, training: F.relu(x[0])
    if kind == "sigmoid":
        return lambda x, w, training: F.sigmoid(x[0])
    if kind == "gelu":
        return lambda x, w, training: 0.5 * x[0] * (1 + F.erf(x[0] * 0.5**0.5))
    if kind == "global_avg_pool":
        return lambda x, w, training: F.reshape(F.average_pooling_2d(x[0], x[0].shape[2:]), x[0].shape[:2])
    if kind == "lrn":
        # Here alpha is not divided by size.
        alpha = s["alpha"] / s["size"]
        return lambda x, w, training: F.local_response_normalization(x[0], s["size"], s["k"], alpha, s["beta"])
    if kind == "dropout":
        return lambda x, w, training: F.dropout(x[0], s["rate"]) if training else F.identity(x[0])
    if kind == "batch_norm":
        return lambda x, w, training: F.batch_normalization(x[0], w[0], w[1], eps=s["epsilon"])
    if kind == "add":
        return lambda x, w, training: F.add(*x)
    if kind == "concat":
        return lambda x, w, training: F.concat(x, axis=1)
    if kind == "flatten":
        return lambda x, w, training: F.reshape(x[0], (x[0].shape[0], -1))
    if kind == "embedding":
        return lambda x, w, training: F.embed_id(x[0], w[0])
    if kind == "position":
        return lambda x, w, training: x[0] + F.broadcast_to(w[0], x[0].shape)
    if kind == "last":
        return lambda x, w, training: x[0][:, -1]
    if kind == "mean_steps":
        return lambda x, w, training: F.mean(x[0], axis=1)
    raise NotImplementedError("layer %s: kind %r is unknown" % (layer["name"], kind))


def unit_by_unit(values):
    """Rows in the description's order (input, forget, cell, output) -> Chainer's."""
    gates = values.reshape((4, -1, *values.shape[1:]))[[2, 0, 1, 3]]
    return np.ascontiguousarray(gates.swapaxes(0, 1)).reshape(values.shape)


def gate_by_gate(values):
    """The way back."""
    gates = values.reshape((-1, 4, *values.shape[1:])).swapaxes(0, 1)
    return gates[[1, 2, 0, 3]].reshape(values.shape)


class Stamps(chainer.FunctionHook):
    """A time stamp wherever a layer begins: called by the trainer in forward, by Chainer in backward.

    What lies between two stamps belongs to what began at the first. Functions made while a layer ran forward are its.
    """

    def __init__(self):
        self.taken, self.functions, self._owners, self._layer = [], {}, {}, None

    def began(self, part):
        self.taken.append((part, time.perf_counter()))

    def forward_of(self, layer):
        self._layer = layer
        self.began(("forward_s", layer))

    def forward_postprocess(self, function, in_data):
        # The function is kept, so that no other gets its id.
        self._owners[id(function)] = self._layer, function
        self.functions[self._layer] = self.functions.get(self._layer, 0) + 1

    def backward_preprocess(self, function, in_data, out_grad):
        layer, _ = self._owners[id(function)]
        self.began("loss" if layer is None else ("backward_s", layer))

    def durations(self):
        """{part: seconds} of the stamps taken so far."""
        found = {}
        for (part, start), (_, end) in zip(self.taken, self.taken[1:]):
            found[part] = found.get(part, 0.0) + end - start
        return found


def seconds_of_hooks():
    """{phase: what Stamps adds to a function}: a chain of functions that do nothing, with and without, tells."""
    differences = [np.subtract(chain_s(Stamps()), chain_s(None)) for _ in range(HOOK_CHAINS)]
    added = np.median(differences, axis=0) / HOOK_CHAIN
    return dict(zip(("forward_s", "backward_s"), added.tolist()))


def chain_s(hook):
    """(forward seconds, backward seconds) of the chain."""
    x = chainer.Variable(np.zeros(1, np.float32))
    with contextlib.ExitStack() as hooks:
        if hook is not None:
            hooks.enter_context(hook)
        times = [time.perf_counter()]
        for _ in range(HOOK_CHAIN):
            x = F.identity(x)
        times.append(time.perf_counter())
        x.backward()
        times.append(time.perf_counter())
    return np.diff(times)


class Trainer(object):
    _hooks_s = None

    def __init__(self, network, weights, batch, learning_rate):
        self._batch = batch
        self._gated = {p["name"] for layer in network["layers"] if layer["kind"] == "lstm" for p in layer["parameters"]}
        self._weights = {
            name: chainer.Parameter(unit_by_unit(values) if name in self._gated else values.copy())
            for name, values in weights.items()
        }
        self._link = chainer.Link()
        with self._link.init_scope():
            for number, parameter in enumerate(self._weights.values()):
                setattr(self._link, "parameter%d" % number, parameter)
        self._optimizer = chainer.optimizers.SGD(learning_rate).setup(self._link)
        self._layers = []
        for layer in network["layers"]:
            parameters = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            self._layers.append((layer["name"], layer["inputs"], parameters, operation(layer)))

    def step(self, images, labels):
        loss = F.softmax_cross_entropy(self._forward(images, True), labels)
        self._backward(loss)
        self._optimizer.update()
        return float(loss.array)

    def phases(self, images, labels):
        """Nothing is copied to a device: arrays are used where they are."""
        times = [time.perf_counter()]
        loss = F.softmax_cross_entropy(self._forward(images, True), labels)
        times.append(time.perf_counter())
        self._backward(loss)
        times.append(time.perf_counter())
        self._optimizer.update()
        times.append(time.perf_counter())
        names = ("forward", "backward", "update")
        return dict({name: end - start for name, start, end in zip(names, times, times[1:])}, h2d=0.0)

    def profiled_step(self, images, labels):
        """What the hooks add is measured apart and taken off each layer, as often as it has functions."""
        if self._hooks_s is None:
            self._hooks_s = seconds_of_hooks()
        stamps = Stamps()
        with stamps:
            outputs = {"input": chainer.Variable(images, requires_grad=False)}
            for name, sources, parameters, run in self._layers:
                inputs = [outputs[source] for source in sources]
                stamps.forward_of(name)
                outputs[name] = run(inputs, parameters, True)
                stamps.began("dispatch")
            stamps.forward_of(None)
            loss = F.softmax_cross_entropy(outputs[name], labels)
            # As in a plain step: what backward does not need is free before it begins.
            del outputs, inputs
            stamps.began("dispatch")
            self._backward(loss)
            stamps.began("update")
            self._optimizer.update()
            stamps.began("end")
        found = stamps.durations()

        def own_s(phase, name):
            added_s = self._hooks_s[phase] * stamps.functions.get(name, 0)
            return max(0.0, found.get((phase, name), 0.0) - added_s)

        layers = [
            {"layer": name, "forward_s": own_s("forward_s", name), "backward_s": own_s("backward_s", name)}
            for name, _, _, _ in self._layers
        ]
        loss_s = found["loss"] + found["forward_s", None]
        parts = {"h2d": 0.0, "loss": loss_s, "update": found["update"], "dispatch": found["dispatch"]}
        return {"layers": layers, "parts": parts}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient in our layout})."""
        outputs, runs = {"input": chainer.Variable(images, requires_grad=False)}, []
        self._link.cleargrads()
        for name, sources, parameters, run in self._layers:
            # Cut from the layers before, so that backward, too, runs one layer at a time.
            inputs = [
                chainer.Variable(outputs[source].array, requires_grad=outputs[source].requires_grad)
                for source in sources
            ]
            start = time.perf_counter()
            outputs[name] = run(inputs, parameters, True)
            runs.append((name, sources, inputs, time.perf_counter() - start))
        last = chainer.Variable(outputs[name].array)
        F.softmax_cross_entropy(last, labels).backward()
        upstream, times = {name: last.grad}, []
        for name, sources, inputs, forward_s in reversed(runs):
            output, start = outputs[name], time.perf_counter()
            if output.requires_grad:
                output.grad = upstream.pop(name)
                output.backward()
                for source, variable in zip(sources, inputs):
                    if variable.requires_grad:
                        gradient = variable.grad
                        upstream[source] = upstream[source] + gradient if source in upstream else gradient
            times.append({"layer": name, "forward_s": forward_s, "backward_s": time.perf_counter() - start})
        return times[::-1], {name: parameter.grad for name, parameter in self._weights.items()}

    def gradients(self, images, labels):
        outputs = self._forward(images, False)
        loss = F.softmax_cross_entropy(outputs, labels)
        self._backward(loss)
        found = self.arrays({name: parameter.grad for name, parameter in self._weights.items()})
        return dict(found, outputs=outputs.array, loss=loss.array)

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of arrays in our layout."""
        return {name: gate_by_gate(array) if name in self._gated else array for name, array in tensors.items()}

    def flops(self, images, labels):
        """Chainer has no counter of its own."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        found = {}
        with chainer.no_backprop_mode():
            self._forward(images, False, found)
        return found

    def parameter_count(self):
        return self._link.count_params()

    def device_peak_bytes(self):
        return None

    def _forward(self, images, training, shapes=None):
        outputs = {"input": chainer.Variable(images, requires_grad=False)}
        for name, sources, parameters, run in self._layers:
            x = outputs[name] = run([outputs[source] for source in sources], parameters, training)
            if shapes is not None:
                shapes[name] = list(x.shape[1:])
        return x

    def _backward(self, loss):
        self._link.cleargrads()
        loss.backward()
