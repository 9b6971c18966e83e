"""TensorFlow 2. See adapters/__init__.py.

Mode "graph": the whole step is one tf.function. "eager": no tf.function. "xla": that function compiled by XLA, which
fuses layers and phases, so none can be timed.

Images and activations are channels-last inside; weights are transposed when they are loaded and gradients when they
are handed out, among them the dense weights after a flatten, whose features are numbered channels-first outside.
"""

import glob
import json
import os
import re
import shutil
import sys
import tempfile
import time

import numpy as np

# Keras is not used here, and importing it takes a third of TensorFlow's start; TensorFlow goes on without it.
sys.modules["keras"] = None
import tensorflow as tf  # noqa: E402

CHANNELS_LAST = True


def versions():
    try:
        from tensorflow.python.util import _pywrap_util_port

        blas = "oneDNN" if _pywrap_util_port.IsMklEnabled() else "Eigen"
    except (ImportError, AttributeError):
        blas = "unknown"
    return {"framework": tf.__version__, "blas": blas}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if tf.config.threading.get_intra_op_parallelism_threads() != threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    if tf.config.threading.get_inter_op_parallelism_threads() != 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    if device == "cuda" and not tf.config.list_physical_devices("GPU"):
        raise ValueError("device = 'cuda': this TensorFlow sees no GPU")
    # float32 means float32.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.random.set_seed(seed)
    trainer = {"graph": GraphTrainer, "eager": EagerTrainer, "xla": Trainer}[mode]
    return trainer(network, weights, batch, learning_rate, device, mode)


def edges(settings):
    """The described padding in the form that convolutions and max pooling take."""
    top, bottom, left, right = settings["pad"]
    return [[0, 0], [top, bottom], [left, right], [0, 0]]


def padding(settings):
    """The same; without any, the kernels that know no explicit padding are the faster ones."""
    return edges(settings) if any(settings["pad"]) else "VALID"


def grouped_convolution(x, weight, settings):
    """One convolution a group, joined: the gradient of a grouped Conv2D does not exist on the CPU."""
    groups = settings["groups"]
    if groups == 1:
        return tf.nn.conv2d(x, weight, settings["stride"], padding(settings))
    parts = zip(tf.split(x, groups, axis=3), tf.split(weight, groups, axis=3))
    return tf.concat([tf.nn.conv2d(a, b, settings["stride"], padding(settings)) for a, b in parts], 3)


def token_dense(x, weight, bias):
    """One product for all steps of all samples, as Keras' Dense: a product a sample would be slower."""
    shape = x.shape[:-1] + weight.shape[1:]
    return tf.reshape(tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, x.shape[-1])), weight), bias), shape)


def lstm(x, input_weight, hidden_weight, bias):
    """Unrolled, as Keras' LSTM(unroll=True); what the inputs contribute is one product for all steps."""
    batch, hidden = x.shape[0], hidden_weight.shape[0]
    output = state = tf.zeros((batch, hidden))
    outputs = []
    for gates in tf.unstack(token_dense(x, input_weight, bias), axis=1):
        # Nothing is left out at the first step, whose state is 0: a framework's own LSTM does not either.
        enter, forget, cell, leave = tf.split(gates + tf.matmul(output, hidden_weight), 4, axis=1)
        state = tf.sigmoid(forget) * state + tf.sigmoid(enter) * tf.tanh(cell)
        output = tf.sigmoid(leave) * tf.tanh(state)
        outputs.append(output)
    return tf.stack(outputs, axis=1)


def attention(x, w, heads):
    batch, steps, features = x.shape
    qkv = tf.reshape(token_dense(x, w[0], w[1]), (batch, steps, 3, heads, features // heads))
    query, key, value = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))
    scores = tf.matmul(query * (features // heads) ** -0.5, key, transpose_b=True)
    mixed = tf.matmul(tf.nn.softmax(scores), value)
    return token_dense(tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), x.shape), w[2], w[3])


def operation(layer):
    """The function (inputs, weights, training) -> output of one layer."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":

        def convolution(x, w, training):
            y = grouped_convolution(x[0], w[0], s)
            return tf.nn.bias_add(y, w[1]) if s["bias"] else y

        return convolution
    if kind == "dense":

        def dense(x, w, training):
            y = tf.matmul(x[0], w[0])
            return tf.nn.bias_add(y, w[1]) if s["bias"] else y

        return dense
    if kind == "relu":
        return lambda x, w, training: tf.nn.relu(x[0])
    if kind == "max_pool":
        # Padding never wins here: the kernels leave it out of the window.
        return lambda x, w, training: tf.nn.max_pool2d(x[0], s["kernel"], s["stride"], padding(s))
    if kind == "avg_pool":
        # The padding is added before, since the kernel would leave it out of the mean.
        return lambda x, w, training: tf.nn.avg_pool2d(tf.pad(x[0], edges(s)), s["kernel"], s["stride"], "VALID")
    if kind == "global_avg_pool":
        return lambda x, w, training: tf.reduce_mean(x[0], (1, 2))
    if kind == "lrn":
        radius, alpha = s["size"] // 2, s["alpha"] / s["size"]
        return lambda x, w, training: tf.nn.local_response_normalization(x[0], radius, s["k"], alpha, s["beta"])
    if kind == "dropout":
        return lambda x, w, training: tf.nn.dropout(x[0], s["rate"]) if training else tf.identity(x[0])
    if kind == "batch_norm":

        def batch_norm(x, w, training):
            # The raw operation: tf.nn.fused_batch_norm would raise an epsilon of 1e-5.
            none = tf.zeros([0])
            return tf.raw_ops.FusedBatchNormV3(
                x=x[0], scale=w[0], offset=w[1], mean=none, variance=none, epsilon=s["epsilon"], is_training=True
            ).y

        return batch_norm
    if kind == "add":
        return lambda x, w, training: tf.add_n(x)
    if kind == "concat":
        return lambda x, w, training: tf.concat(x, 3)
    if kind == "flatten":
        return lambda x, w, training: tf.reshape(x[0], (x[0].shape[0], layer["out_shape"][0]))
    if kind == "sigmoid":
        return lambda x, w, training: tf.sigmoid(x[0])
    if kind == "gelu":
        return lambda x, w, training: tf.nn.gelu(x[0])
    if kind == "embedding":
        return lambda x, w, training: tf.gather(w[0], x[0])
    if kind == "position":
        return lambda x, w, training: x[0] + w[0]
    if kind == "lstm":
        return lambda x, w, training: lstm(x[0], *w)
    if kind == "attention":
        return lambda x, w, training: attention(x[0], w, s["heads"])
    if kind == "token_dense":
        return lambda x, w, training: token_dense(x[0], w[0], w[1])
    if kind == "layer_norm":

        def layer_norm(x, w, training):
            mean, variance = tf.nn.moments(x[0], -1, keepdims=True)
            return tf.nn.batch_normalization(x[0], mean, variance, w[1], w[0], s["epsilon"])

        return layer_norm
    if kind == "last":
        return lambda x, w, training: x[0][:, -1]
    if kind == "mean_steps":
        return lambda x, w, training: tf.reduce_mean(x[0], 1)
    raise ValueError("layer %s: kind %r is unknown" % (layer["name"], kind))


def compilable_max_pool(layer):
    """Max pooling for XLA, which knows no explicit padding: minus infinity is put around the input."""
    s = layer["settings"]
    if not any(s["pad"]):
        return lambda x, w, training: tf.nn.max_pool2d(x[0], s["kernel"], s["stride"], "VALID")

    def max_pool(x, w, training):
        padded = tf.pad(x[0], edges(s), constant_values=-float("inf"))
        return tf.nn.max_pool2d(padded, s["kernel"], s["stride"], "VALID")

    return max_pool


def weight_orders(network):
    """{parameter: function from the description's layout to ours and back}, for those that differ.

    A flatten numbers features channels-first in the description and channels-last here; element-wise layers between
    it and the dense layer keep the numbering.
    """
    orders, numbering = {}, {}
    for layer in network["layers"]:
        source = layer["inputs"][0]
        if layer["kind"] == "flatten":
            shape = layer["in_shapes"][0]
            numbering[layer["name"]] = np.arange(np.prod(shape)).reshape(shape).transpose(1, 2, 0).ravel()
        elif layer["kind"] in ("relu", "sigmoid", "gelu", "dropout") and source in numbering:
            numbering[layer["name"]] = numbering[source]
        elif layer["kind"] == "conv":
            orders[layer["parameters"][0]["name"]] = (
                lambda values: values.transpose(2, 3, 1, 0),
                lambda values: values.transpose(3, 2, 0, 1),
            )
        elif layer["kind"] == "dense":
            orders[layer["parameters"][0]["name"]] = dense_order(numbering.get(source))
        elif layer["kind"] in ("token_dense", "lstm", "attention"):
            matrices = [parameter["name"] for parameter in layer["parameters"] if len(parameter["shape"]) == 2]
            orders.update((name, dense_order(None)) for name in matrices)
    return orders


def dense_order(numbering):
    if numbering is None:
        return np.transpose, np.transpose
    back = np.argsort(numbering)
    return lambda values: values.T[numbering], lambda values: values[back].T


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, device, mode):
        self._mode = mode
        self._cuda = device == "cuda"
        self._batch = batch
        self._network = network
        self._learning_rate = learning_rate
        self._orders = weight_orders(network)
        with tf.device(self._device_name()):
            self._weights = {name: tf.Variable(self._ours(name, values)) for name, values in weights.items()}
        self._layers = []
        for layer in network["layers"]:
            variables = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            run = compilable_max_pool(layer) if (mode, layer["kind"]) == ("xla", "max_pool") else operation(layer)
            self._layers.append((layer["name"], layer["inputs"], variables, run))
        self._found_shapes = {}
        if network["vocabulary"]:
            inputs = tf.TensorSpec([batch, *network["input_shape"]], tf.int64)
        else:
            channels, height, width = network["input_shape"]
            inputs = tf.TensorSpec((batch, height, width, channels), tf.float32)
        self._signature = (inputs, tf.TensorSpec((batch,), tf.int64))
        self._traced = {}
        self._step = self._function(self._whole_step)

    def step(self, images, labels):
        loss = self._step(*self._to_device(images, labels))
        self._wait()
        return float(loss)

    def gradients(self, images, labels):
        evaluate = self._once("evaluate", self._evaluate)
        loss, outputs, gradients = evaluate(*self._to_device(images, labels))
        return dict(self.arrays(dict(zip(self._weights, gradients))), outputs=outputs.numpy(), loss=loss.numpy())

    def flops(self, images, labels):
        """Forward only: the profiler's counts of backward operations do not cover them all."""
        try:
            from tensorflow.compat.v1 import profiler

            function = tf.function(self._loss, input_signature=self._signature, autograph=False)
            graph = function.get_concrete_function().graph
            options = profiler.ProfileOptionBuilder.float_operation()
            options["output"] = "none"
            counts = profiler.profile(graph, cmd="op", options=options)
        except (ImportError, AttributeError):
            return {"forward": None, "backward": None}
        total, node = 0, counts
        while node.children:
            node = node.children[0]
            total += node.float_ops if node.name in ("Conv2D", "MatMul", "BatchMatMulV2") else 0
        return {"forward": total // self._batch, "backward": None}

    def shapes(self, images):
        if self._mode == "eager":
            self._forward(tf.convert_to_tensor(images), False)
        else:
            self._step.get_concrete_function()
        return self._found_shapes

    def parameter_count(self):
        return int(sum(np.prod(variable.shape) for variable in self._weights.values()))

    def device_peak_bytes(self):
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] if self._cuda else None

    def _forward(self, x, training):
        outputs = {"input": x}
        for name, sources, variables, run in self._layers:
            x = outputs[name] = run([outputs[source] for source in sources], variables, training)
            shape = x.shape.as_list()[1:]
            self._found_shapes[name] = shape[-1:] + shape[:-1] if len(shape) == 3 else shape
        return x

    def _loss(self, images, labels):
        return mean_loss(self._forward(images, True), labels)

    def _loss_and_gradients(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self._loss(images, labels)
        return loss, tape.gradient(loss, list(self._weights.values()))

    def _whole_step(self, images, labels):
        loss, gradients = self._loss_and_gradients(images, labels)
        self._update(gradients)
        return loss

    def _update(self, gradients):
        for variable, gradient in zip(self._weights.values(), gradients):
            if isinstance(gradient, tf.IndexedSlices):
                # Of an embedding: only the rows that were looked up.
                changes = tf.IndexedSlices(self._learning_rate * gradient.values, gradient.indices)
                variable.scatter_sub(changes)
            else:
                variable.assign_sub(self._learning_rate * gradient)

    def _evaluate(self, images, labels):
        with tf.GradientTape() as tape:
            outputs = self._forward(images, False)
            loss = mean_loss(outputs, labels)
        return loss, outputs, tape.gradient(loss, list(self._weights.values()))

    def _once(self, name, python_function):
        """The graph of that name, traced the first time it is asked for."""
        if name not in self._traced:
            self._traced[name] = self._function(python_function)
            if self._mode != "eager":
                self._traced[name].get_concrete_function()
        return self._traced[name]

    def _function(self, python_function):
        if self._mode == "eager":
            return python_function
        compiled = True if self._mode == "xla" else None
        return tf.function(python_function, input_signature=self._signature, autograph=False, jit_compile=compiled)

    def _ours(self, name, values):
        return self._orders[name][0](values) if name in self._orders else values

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of tensors in our layout."""
        arrays = {name: tf.convert_to_tensor(tensor).numpy() for name, tensor in tensors.items()}
        return {name: self._orders[name][1](a) if name in self._orders else a for name, a in arrays.items()}

    def _to_device(self, images, labels):
        with tf.device(self._device_name()):
            return tf.convert_to_tensor(images), tf.convert_to_tensor(labels)

    def _device_name(self):
        return "/GPU:0" if self._cuda else "/CPU:0"

    def _wait(self):
        if self._cuda:
            tf.test.experimental.sync_devices()

    def _now(self):
        self._wait()
        return time.perf_counter()


class GraphTrainer(Trainer):
    """The step is one graph; phases are graphs of their own, and so are layers where the profiler cannot time them.

    On the CPU it can: the operations of each layer, of the loss and of the update are named after them.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._layers = [
            (name, sources, variables, within("layer%d" % number, run))
            for number, (name, sources, variables, run) in enumerate(self._layers)
        ]
        if self._cuda:
            # There the host's operations only launch kernels.
            self.profiled_step = None

    def profiled_step(self, images, labels):
        """A whole step under TensorFlow's profiler: the seconds of each layer's operations inside the step's graph.

        `dispatch` is the call's time in which no operation runs; `other` are operations that belong to no layer, to
        sum gradients and to read variables.
        """
        with Profile() as profile:
            start = time.perf_counter()
            x, y = self._to_device(images, labels)
            copied = time.perf_counter()
            float(self._step(x, y))
            end = time.perf_counter()
        seconds = profile.seconds_by_part()
        layers = [
            {
                "layer": layer[0],
                "forward_s": seconds.pop((number, False), 0.0),
                "backward_s": seconds.pop((number, True), 0.0),
            }
            for number, layer in enumerate(self._layers)
        ]
        running = sum(seconds.values()) + sum(layer["forward_s"] + layer["backward_s"] for layer in layers)
        dispatch = max(0.0, end - copied - running)
        parts = {name: seconds.get(name, 0.0) for name in ("loss", "update", "other")}
        return {"layers": layers, "parts": dict(parts, h2d=copied - start, dispatch=dispatch)}

    def _loss(self, images, labels):
        outputs = self._forward(images, True)
        with tf.name_scope("loss"):
            return mean_loss(outputs, labels)

    def _update(self, gradients):
        with tf.name_scope("update"):
            super()._update(gradients)

    def phases(self, images, labels):
        """Backward and update are differences of functions traced apart, run one after the other on this batch:

        backward = (forward + backward) - forward, update = step - (forward + backward), each 0 where noise makes the
        difference negative.
        """
        forward, both = self._once("forward", self._loss), self._once("both", self._loss_and_gradients)
        start = self._now()
        x, y = self._to_device(images, labels)
        h2d = self._now() - start
        seconds = []
        for function in (forward, both, self._step):
            start = self._now()
            function(x, y)
            seconds.append(self._now() - start)
        return {
            "h2d": h2d,
            "forward": seconds[0],
            "backward": max(0.0, seconds[1] - seconds[0]),
            "update": max(0.0, seconds[2] - seconds[1]),
        }

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient in our layout}).

        A layer on its own pays for a call that it does not pay for inside the step's graph: forward is its call less
        a call that does nothing, backward its (forward + backward) less its forward; 0 where noise makes it negative.
        """
        x, y = self._to_device(images, labels)
        outputs, trained, runs = {"input": x}, {"input": False}, []
        for layer, (name, sources, variables, run) in zip(self._network["layers"], self._layers):
            inputs = [outputs[source] for source in sources]
            wanted = [number for number, source in enumerate(sources) if trained[source]]
            forward, both = self._layer_functions(layer, wanted, run, inputs, variables)
            nothing = self._empty_call([tensor.dtype for tensor in inputs])
            start = self._now()
            nothing(inputs)
            called = self._now()
            outputs[name] = forward(inputs, variables)
            forward_s = self._now() - called
            trained[name] = bool(wanted or variables)
            runs.append((name, sources, wanted, inputs, variables, both, forward_s, called - start))
        last = self._layers[-1][0]
        upstream = {last: [loss_gradient(outputs[last], y)]}
        times, found = [], {}
        for name, sources, wanted, inputs, variables, both, forward_s, call_s in reversed(runs):
            backward_s = 0.0
            if trained[name]:
                gradients_above = upstream.pop(name)
                start = self._now()
                above = tf.add_n(gradients_above) if len(gradients_above) > 1 else gradients_above[0]
                _, gradients = both(above, inputs, variables)
                backward_s = max(0.0, self._now() - start - forward_s)
                for number, gradient in zip(wanted, gradients):
                    upstream.setdefault(sources[number], []).append(gradient)
                found.update(zip((variable.ref() for variable in variables), gradients[len(wanted) :]))
            times.append({"layer": name, "forward_s": max(0.0, forward_s - call_s), "backward_s": backward_s})
        return times[::-1], {name: found[variable.ref()] for name, variable in self._weights.items()}

    def _layer_functions(self, layer, wanted, run, inputs, variables):
        """(forward, forward + backward) of one layer; the latter returns the output, too, so that it is computed.

        Layers alike share them, since tracing takes longer than running. They are called as concrete functions, whose
        call costs half of a tf.function's: with small layers the call is most of the time.
        """
        key = json.dumps([layer["kind"], layer["settings"], layer["in_shapes"], wanted], sort_keys=True)
        if key not in self._traced:

            def forward(inputs, variables):
                return run(inputs, variables, True)

            def both(above, inputs, variables):
                watched = [inputs[number] for number in wanted]
                with tf.GradientTape() as tape:
                    tape.watch(watched)
                    output = run(inputs, variables, True)
                return output, tape.gradient(output, watched + variables, output_gradients=above)

            forward_graph = tf.function(forward, autograph=False).get_concrete_function(inputs, variables)
            both_graph = None
            if wanted or variables:
                above = tf.TensorSpec(forward_graph.output_shapes, forward_graph.output_dtypes)
                both_graph = tf.function(both, autograph=False).get_concrete_function(above, inputs, variables)
            self._traced[key] = forward_graph, both_graph
        return self._traced[key]

    def _empty_call(self, dtypes):
        """A graph that hands back the first of inputs of these types, whatever their shapes."""
        key = "nothing", tuple(dtypes)
        if key not in self._traced:
            specs = [tf.TensorSpec(None, dtype) for dtype in dtypes]
            self._traced[key] = tf.function(lambda values: values[0], autograph=False).get_concrete_function(specs)
        return self._traced[key]


class EagerTrainer(Trainer):
    """Operations run one by one, on a tape."""

    def phases(self, images, labels):
        times = [self._now()]
        x, y = self._to_device(images, labels)
        times.append(self._now())
        with tf.GradientTape() as tape:
            loss = self._loss(x, y)
        times.append(self._now())
        gradients = tape.gradient(loss, list(self._weights.values()))
        times.append(self._now())
        self._update(gradients)
        times.append(self._now())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient in our layout}); each layer has a tape of its own."""
        x, y = self._to_device(images, labels)
        outputs, trained, runs = {"input": x}, {"input": False}, []
        for name, sources, variables, run in self._layers:
            inputs = [outputs[source] for source in sources]
            wanted = [number for number, source in enumerate(sources) if trained[source]]
            watched = [inputs[number] for number in wanted]
            start = self._now()
            with tf.GradientTape() as tape:
                tape.watch(watched)
                outputs[name] = run(inputs, variables, True)
            forward_s = self._now() - start
            trained[name] = bool(wanted or variables)
            runs.append((name, [sources[number] for number in wanted], watched, variables, tape, forward_s))
        last = self._layers[-1][0]
        upstream = {last: [loss_gradient(outputs[last], y)]}
        times, found = [], {}
        for name, sources, watched, variables, tape, forward_s in reversed(runs):
            start = self._now()
            if trained[name]:
                above = upstream.pop(name)
                above = tf.add_n(above) if len(above) > 1 else above[0]
                gradients = tape.gradient(outputs[name], watched + variables, output_gradients=above)
                for source, gradient in zip(sources, gradients):
                    upstream.setdefault(source, []).append(gradient)
                found.update(zip((variable.ref() for variable in variables), gradients[len(sources) :]))
            times.append({"layer": name, "forward_s": forward_s, "backward_s": self._now() - start})
        return times[::-1], {name: found[variable.ref()] for name, variable in self._weights.items()}


class Profile(object):
    """TensorFlow's profiler for the time of a `with`; then what each operation of a GraphTrainer's step took."""

    def __enter__(self):
        self._folder = tempfile.mkdtemp()
        # Level 3 is the first that records cheap operations, too.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
        )
        tf.profiler.experimental.start(self._folder, options=options)
        return self

    def __exit__(self, *error):
        tf.profiler.experimental.stop()
        paths = glob.glob(os.path.join(self._folder, "plugins", "profile", "*", "*.xplane.pb"))
        self._spaces = []
        for path in paths:
            with open(path, "rb") as file:
                self._spaces.append(file.read())
        shutil.rmtree(self._folder)

    def seconds_by_part(self):
        """{(layer's number, is backward), "loss", "update" or "other": seconds}; nested operations count once."""
        seconds, running_until = {}, 0
        for start, end, name in sorted(self._operations()):
            start = max(start, running_until)
            if end > start:
                part = part_of(name)
                seconds[part] = seconds.get(part, 0.0) + (end - start) * 1e-12
                running_until = end
        return seconds

    def _operations(self):
        """(start, end, node's name) of the operations that ran, picoseconds."""
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        for content in self._spaces:
            space = xplane_pb2.XSpace()
            space.ParseFromString(content)
            for plane in space.planes:
                for line in plane.lines:
                    for event in line.events:
                        metadata = plane.event_metadata[event.metadata_id]
                        name, _, kind = metadata.name.rpartition(":")
                        if kind and kind == metadata.display_name:
                            start = line.timestamp_ns * 1000 + event.offset_ps
                            yield start, start + event.duration_ps, name


def part_of(name):
    """What the operation of that name belongs to: gradients are named gradient_tape/ and after their operation."""
    layer = re.search(r"(?:^|/)layer(\d+)/", name)
    if layer:
        return int(layer.group(1)), "gradient_tape/" in name
    for part in ("loss", "update"):
        if re.search("(?:^|/)%s/" % part, name):
            return part
    return "other"


def within(name, run):
    """The layer's function with its operations under that name."""

    def named(inputs, variables, training):
        with tf.name_scope(name):
            return run(inputs, variables, training)

    return named


def mean_loss(outputs, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs))


def loss_gradient(outputs, labels):
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = mean_loss(outputs, labels)
    return tape.gradient(loss, outputs)
