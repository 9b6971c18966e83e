"""Caffe 1.0, CPU only: a prototxt made from the description, trained by Caffe's own solver. See adapters/__init__.py.

As in Caffe's own model files, ReLU, dropout and batch norm work in place where nothing else reads their input. Caffe's
batch norm also keeps running statistics, and its SGD a history of momentum 0: neither can be switched off. Sequences
are (steps, batch, ...), as its LSTM wants them.
"""

import ctypes
import tempfile
import time

import caffe
import numpy as np

CHANNELS_LAST = False
LOSS = "softmax loss"

# Layers that may overwrite their input, and those whose backward does not need the output that is overwritten.
IN_PLACE = ("relu", "dropout", "batch_norm")
MAY_BE_OVERWRITTEN = (
    *("conv", "dense", "add", "concat", "max_pool", "avg_pool", "global_avg_pool"),
    *("relu", "dropout", "batch_norm"),
)


def openblas():
    """The OpenBLAS that Caffe is linked with (numpy brings one of its own, under other names)."""
    library = ctypes.CDLL("libopenblas.so.0")
    library.openblas_get_config.restype = ctypes.c_char_p
    return library


LACKING = (
    ("attention", "Caffe 1.0 has no product of two activations' matrices"),
    ("layer_norm", "Caffe 1.0 has no layer normalisation"),
    ("gelu", "Caffe 1.0 has no GELU"),
    ("mean_steps", "Caffe 1.0 reduces trailing axes only"),
    ("position", "Caffe 1.0 adds nothing that repeats over the middle axis of (steps, batch, features)"),
)


def versions():
    blas = " ".join(openblas().openblas_get_config().decode().split()[:2])
    return {"framework": caffe.__version__, "blas": blas}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %s: this Caffe is built for the CPU only" % device)
    openblas().openblas_set_num_threads(threads)
    caffe.set_mode_cpu()
    caffe.set_random_seed(seed)
    return Trainer(network, weights, batch, learning_rate)


def unsupported(layer, reason):
    return NotImplementedError("layer %s: %s" % (layer["name"], reason))


def message(field, **values):
    """A protobuf message as text; a list is a repeated field."""
    lines = []
    for key, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            lines.append("%s: %s" % (key, str(item).lower() if isinstance(item, bool) else item))
    return "%s { %s }" % (field, " ".join(lines))


def from_text(make, text):
    """What `make` makes of a file with `text`: Caffe reads files only."""
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(text)
        file.flush()
        return make(file.name)


def quoted(text):
    return '"%s"' % text


def window(layer):
    s = layer["settings"]
    (high, wide), (down, right) = s["kernel"], s["stride"]
    return {
        **{"kernel_h": high, "kernel_w": wide, "stride_h": down, "stride_w": right},
        **{"pad_h": s["pad"][0], "pad_w": s["pad"][2]},
    }


def convolution(layer):
    s = layer["settings"]
    top, bottom, left, right = s["pad"]
    if top != bottom or left != right:
        raise unsupported(layer, "Caffe pads both edges alike, not %s" % s["pad"])
    fields = dict(window(layer), num_output=s["out_channels"], group=s["groups"], bias_term=s["bias"])
    return [("", "Convolution", message("convolution_param", **fields))]


def pooling(layer):
    """Caffe rounds the number of windows up and pads both edges alike (PoolingLayer::Reshape)."""
    s = layer["settings"]
    average = layer["kind"] == "avg_pool"
    for begin, kernel, stride, length, wanted in zip(
        (s["pad"][0], s["pad"][2]), s["kernel"], s["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        windows = -(-(length + 2 * begin - kernel) // stride) + 1
        if begin and (windows - 1) * stride >= length + begin:
            windows -= 1
        if windows != wanted or begin >= kernel:
            raise unsupported(layer, "Caffe's rounding makes %d windows of it, not %d" % (windows, wanted))
        # A window over the edge of the padding is divided by the area inside.
        if average and (windows - 1) * stride + kernel > length + 2 * begin:
            raise unsupported(layer, "Caffe averages a window that overhangs over the area inside only")
    return [("", "Pooling", message("pooling_param", pool="AVE" if average else "MAX", **window(layer)))]


def batch_norm(layer):
    fixed = ["param { lr_mult: 0 decay_mult: 0 }"] * 3
    statistics = message("batch_norm_param", eps=layer["settings"]["epsilon"], use_global_stats=False)
    return [("", "BatchNorm", " ".join([*fixed, statistics])), ("/scale", "Scale", "scale_param { bias_term: true }")]


def inner_product(layer):
    s = layer["settings"]
    axis = 2 if layer["kind"] == "token_dense" else 1
    fields = message("inner_product_param", num_output=s["features"], bias_term=s["bias"], axis=axis)
    return [("", "InnerProduct", fields)]


def embedding(layer):
    s = layer["settings"]
    fields = message("embed_param", num_output=s["features"], input_dim=s["vocabulary"], bias_term=False)
    return [("", "Embed", fields)]


def parts(layer):
    """[(suffix of the name, type, parameters)] of the Caffe layers, one fed by the other, that make up `layer`."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        return convolution(layer)
    if kind in ("dense", "token_dense"):
        return inner_product(layer)
    if kind == "relu":
        return [("", "ReLU", "")]
    if kind == "sigmoid":
        return [("", "Sigmoid", "")]
    if kind in ("max_pool", "avg_pool"):
        return pooling(layer)
    if kind == "global_avg_pool":
        pool = message("pooling_param", pool="AVE", global_pooling=True)
        return [("", "Pooling", pool), ("/flat", "Flatten", "")]
    if kind == "lrn":
        # Here, too, alpha is divided by size.
        fields = message("lrn_param", local_size=s["size"], alpha=s["alpha"], beta=s["beta"], k=s["k"])
        return [("", "LRN", fields)]
    if kind == "dropout":
        return [("", "Dropout", message("dropout_param", dropout_ratio=s["rate"]))]
    if kind == "batch_norm":
        return batch_norm(layer)
    if kind == "add":
        return [("", "Eltwise", "eltwise_param { operation: SUM }")]
    if kind == "concat":
        return [("", "Concat", "concat_param { axis: 1 }")]
    if kind == "flatten":
        return [("", "Flatten", "")]
    if kind == "embedding":
        return embedding(layer)
    if kind == "lstm":
        return [("", "LSTM", message("recurrent_param", num_output=s["hidden"]))]
    if kind == "last":
        before = layer["in_shapes"][0][0] - 1
        flat = "reshape_param { shape { dim: -1 } axis: 0 num_axes: 2 }"
        return [("", "Slice", "slice_param { axis: 0 slice_point: %d }" % before), ("/flat", "Reshape", flat)]
    raise unsupported(layer, "kind %r is unknown" % kind)


class Description(object):
    """The network as Caffe's: `text` (prototxt), `tops` (the blob of each layer's output)."""

    def __init__(self, network, batch):
        self.tops = {"input": "input"}
        self._kinds = {"input": "input"}
        layers = network["layers"]
        readers = [source for layer in layers for source in layer["inputs"]]
        self._alone = {name for name in readers if readers.count(name) == 1}
        shape = network["input_shape"]
        for kind, reason in LACKING:
            for layer in layers:
                if layer["kind"] == kind:
                    raise unsupported(layer, reason)
        self._lines = []
        steps = shape[0] if network["vocabulary"] else None
        self._input("input", [steps, batch] if steps else [batch, *shape])
        self._input("label", [batch])
        if any(layer["kind"] == "lstm" for layer in layers):
            self._input("continues", [steps, batch])
        for layer in layers:
            self._append(layer)
        self.outputs = self.tops[layers[-1]["name"]]
        self._layer(LOSS, "SoftmaxWithLoss", [self.outputs, "label"], [LOSS], "")
        self.text = "\n".join(self._lines) + "\n"

    def _input(self, name, shape):
        dimensions = " ".join("dim: %d" % length for length in shape)
        self._layer(name, "Input", [], [name], "input_param { shape { %s } }" % dimensions)

    def _append(self, layer):
        name, kind = layer["name"], layer["kind"]
        bottoms = [self.tops[source] for source in layer["inputs"]]
        source = layer["inputs"][0]
        # Where the loss reads an output, too, nobody may overwrite it: the last layer has no reader.
        overwrites = kind in IN_PLACE and source in self._alone and self._kinds[source] in MAY_BE_OVERWRITTEN
        for suffix, type_, parameters in parts(layer):
            in_place = overwrites or (kind == "batch_norm" and suffix)
            top = bottoms[0] if in_place else name + suffix
            tops = [top]
            if type_ == "LSTM":
                bottoms = [*bottoms, "continues"]
            if type_ == "Slice":
                tops = [name + "/before", top]
            self._layer(name + suffix, type_, bottoms, tops, parameters)
            if type_ == "Slice":
                self._layer(name + "/silence", "Silence", tops[:1], [], "")
            bottoms = [top]
        self.tops[name] = bottoms[0]
        self._kinds[name] = kind

    def _layer(self, name, type_, bottoms, tops, parameters):
        lists = {"bottom": [quoted(bottom) for bottom in bottoms], "top": [quoted(top) for top in tops]}
        head = message("layer", name=quoted(name), type=quoted(type_), **lists)
        self._lines.append("%s %s }" % (head[:-2], parameters))


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate):
        self._network = network
        self._sequence = bool(network["vocabulary"])
        self._description = Description(network, batch)
        solver = (
            'base_lr: %.9g lr_policy: "fixed" momentum: 0 weight_decay: 0 display: 0 solver_mode: CPU' % learning_rate
        )
        self._solver = from_text(caffe.SGDSolver, "%s net_param { %s }" % (solver, self._description.text))
        self._net = self._solver.net
        self._without_dropout = None
        for name, blob in self._parameters(self._net):
            self._fill(name, blob.data, weights[name])
        self._owners = self._layer_owners()
        self._gradients_ready_at = None
        self._begin_sequences(self._net)

    def step(self, images, labels):
        self._copy(self._net, images, labels)
        self._solver.step(1)
        return float(self._net.blobs[LOSS].data)

    def phases(self, images, labels):
        last = len(self._net.layers) - 1
        times = [time.perf_counter()]
        self._copy(self._net, images, labels)
        times.append(time.perf_counter())
        self._net.clear_param_diffs()
        self._net._forward(0, last)
        times.append(time.perf_counter())
        self._net._backward(last, 0)
        times.append(time.perf_counter())
        found = {name: end - start for name, start, end in zip(("h2d", "forward", "backward"), times, times[1:])}
        return dict(found, update=self._timed_update())

    def profiled_step(self, images, labels):
        """Caffe runs one layer when told to. A plain step's loop over the layers is Caffe's own: what telling it costs,

        measured with calls that run no layer, is taken off.
        """
        start = time.perf_counter()
        self._copy(self._net, images, labels)
        copied = time.perf_counter()
        forward, backward = self._layer_by_layer()
        ran = time.perf_counter()
        calls = [sum(times.values()) for times in self._layer_by_layer(run_layers=False)]
        told_s = time.perf_counter() - ran
        count = len(self._owners)
        for times, call_s in zip((forward, backward), calls):
            for owner in times:
                times[owner] = max(0.0, times[owner] - call_s * self._owners.count(owner) / count)
        parts = {"h2d": copied - start, "loss": forward.pop(LOSS) + backward.pop(LOSS)}
        parts["other"] = forward.pop(None) + backward.pop(None)
        taken = sum(forward.values()) + sum(backward.values()) + parts["loss"] + parts["other"]
        parts["dispatch"] = max(0.0, ran - copied - told_s - taken)
        return {"layers": self._rows(forward, backward), "parts": dict(parts, update=self._timed_update())}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient})."""
        self._copy(self._net, images, labels)
        rows = self._rows(*self._layer_by_layer())
        return rows, {name: blob.diff for name, blob in self._parameters(self._net)}

    def _layer_by_layer(self, run_layers=True):
        """({owner: forward seconds}, {owner: backward seconds}); owners are layers, LOSS and, for the inputs, None.

        What Caffe inserts to split an output counts with the layer whose output it is. Without `run_layers` each call
        is for a range of layers that is empty.
        """
        net, count = self._net, len(self._owners)
        forward, backward = dict.fromkeys(self._owners, 0.0), dict.fromkeys(self._owners, 0.0)
        if run_layers:
            net.clear_param_diffs()
        past = 0 if run_layers else 1
        for times, run, indices in (
            (forward, net._forward, [(index + past, index) for index in range(count)]),
            (backward, net._backward, [(index, index + past) for index in range(count - 1, -1, -1)]),
        ):
            for first, last in indices:
                start = time.perf_counter()
                run(first, last)
                times[self._owners[min(first, last)]] += time.perf_counter() - start
        return forward, backward

    def _rows(self, forward, backward):
        names = [layer["name"] for layer in self._network["layers"]]
        return [{"layer": name, "forward_s": forward[name], "backward_s": backward[name]} for name in names]

    def _timed_update(self):
        """Seconds of the solver's update; in its step only the moment before it shows, so a whole one is run."""
        if self._gradients_ready_at is None:
            self._solver.add_callback(lambda: None, self._gradients_ready)
        self._solver.step(1)
        return time.perf_counter() - self._gradients_ready_at

    def gradients(self, images, labels):
        net = self._evaluated()
        self._copy(net, images, labels)
        net.clear_param_diffs()
        net._forward(0, len(net.layers) - 1)
        net._backward(len(net.layers) - 1, 0)
        found = self.arrays({name: blob.diff for name, blob in self._parameters(net)})
        outputs, loss = net.blobs[self._description.outputs].data, net.blobs[LOSS].data
        return dict(found, outputs=outputs.copy(), loss=np.float32(loss))

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of Caffe's arrays."""
        return {name: self._reordered(name, array) for name, array in tensors.items()}

    def flops(self, images, labels):
        return {"forward": None, "backward": None}

    def shapes(self, images):
        found = {}
        for layer in self._network["layers"]:
            shape = list(self._net.blobs[self._description.tops[layer["name"]]].data.shape)
            # (steps, batch, features) until the last step is taken
            steps = [shape.pop(0)] if self._sequence and len(layer["out_shape"]) == 2 else []
            found[layer["name"]] = steps + shape[1:]
        return found

    def parameter_count(self):
        return sum(blob.count for _, blob in self._parameters(self._net))

    def device_peak_bytes(self):
        return None

    def _evaluated(self):
        """The same network in the phase in which dropout is off; its weights are the same memory."""
        if self._without_dropout is None:
            self._without_dropout = from_text(lambda path: caffe.Net(path, caffe.TEST), self._description.text)
            self._without_dropout.share_with(self._net)
            self._begin_sequences(self._without_dropout)
        return self._without_dropout

    @staticmethod
    def _begin_sequences(net):
        """Every sequence begins at its first step, where an LSTM's state is 0."""
        if "continues" in net.blobs:
            net.blobs["continues"].data[...] = 1
            net.blobs["continues"].data[0] = 0

    def _parameters(self, net):
        """(name, blob) of what is trained: not a batch norm's running statistics; its scale is a layer of its own."""
        for layer in self._network["layers"]:
            if layer["parameters"]:
                blobs = net.params[layer["name"] + ("/scale" if layer["kind"] == "batch_norm" else "")]
                names = [parameter["name"] for parameter in layer["parameters"]]
                if layer["kind"] == "lstm":
                    names = [names[0], names[2], names[1]]  # Caffe's bias comes before the hidden weights
                for name, blob in zip(names, blobs):
                    yield name, blob

    def _is_of_gates(self, name):
        return any(
            layer["kind"] == "lstm" and name in [parameter["name"] for parameter in layer["parameters"]]
            for layer in self._network["layers"]
        )

    def _reordered(self, name, array):
        """To and from Caffe's order of an LSTM's gates: output before cell, the description's the other way round."""
        if not self._is_of_gates(name):
            return array.copy()
        first, second, third, fourth = np.split(array, 4)
        return np.concatenate([first, second, fourth, third])

    def _fill(self, name, data, values):
        data[...] = self._reordered(name, values).reshape(data.shape)

    def _layer_owners(self):
        """The described layer that each of Caffe's belongs to; LOSS for the loss, None for the inputs."""
        described = {layer["name"] for layer in self._network["layers"]}
        owners, last = [], None
        for name in self._net._layer_names:
            for candidate in (name, name.rsplit("/", 1)[0]):
                if candidate in described or candidate == LOSS:
                    last = candidate
                    break
            owners.append(last)
        return owners

    def _copy(self, net, images, labels):
        net.blobs["input"].data[...] = images.T if self._sequence else images
        net.blobs["label"].data[...] = labels

    def _gradients_ready(self):
        self._gradients_ready_at = time.perf_counter()
