"""TensorFlow 2. Mode "graph": the whole step is one tf.function. See adapters/__init__.py.

Images and activations are channels-last inside; weights are transposed when they are loaded and gradients when they
are handed out, among them the dense weights after a flatten, whose features are numbered channels-first outside.
"""

import json
import sys
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
    return Trainer(network, weights, batch, learning_rate, device)


def edges(settings):
    """The described padding in the form that convolutions and max pooling take."""
    top, bottom, left, right = settings["pad"]
    return [[0, 0], [top, bottom], [left, right], [0, 0]]


def grouped_convolution(x, weight, settings):
    """One convolution a group, joined: the gradient of a grouped Conv2D does not exist on the CPU."""
    groups = settings["groups"]
    if groups == 1:
        return tf.nn.conv2d(x, weight, settings["stride"], edges(settings))
    parts = zip(tf.split(x, groups, axis=3), tf.split(weight, groups, axis=3))
    return tf.concat([tf.nn.conv2d(a, b, settings["stride"], edges(settings)) for a, b in parts], 3)


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
        return lambda x, w, training: tf.nn.max_pool2d(x[0], s["kernel"], s["stride"], edges(s))
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
    raise ValueError("layer %s: kind %r is unknown" % (layer["name"], kind))


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
        elif layer["kind"] in ("relu", "dropout") and source in numbering:
            numbering[layer["name"]] = numbering[source]
        elif layer["kind"] == "conv":
            orders[layer["parameters"][0]["name"]] = (
                lambda values: values.transpose(2, 3, 1, 0),
                lambda values: values.transpose(3, 2, 0, 1),
            )
        elif layer["kind"] == "dense":
            orders[layer["parameters"][0]["name"]] = dense_order(numbering.get(source))
    return orders


def dense_order(numbering):
    if numbering is None:
        return np.transpose, np.transpose
    back = np.argsort(numbering)
    return lambda values: values.T[numbering], lambda values: values[back].T


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, device):
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
            self._layers.append((layer["name"], layer["inputs"], variables, operation(layer)))
        self._found_shapes = {}
        channels, height, width = network["input_shape"]
        self._signature = (
            tf.TensorSpec((batch, height, width, channels), tf.float32),
            tf.TensorSpec((batch,), tf.int64),
        )
        self._traced = {}
        self._step = self._function(self._whole_step)

    def step(self, images, labels):
        loss = self._step(*self._to_device(images, labels))
        self._wait()
        return float(loss)

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
            nothing = self._empty_call(len(inputs))
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

    def gradients(self, images, labels):
        evaluate = self._once("evaluate", self._evaluate)
        loss, outputs, gradients = evaluate(*self._to_device(images, labels))
        return dict(self.arrays(dict(zip(self._weights, gradients))), outputs=outputs.numpy(), loss=loss.numpy())

    def flops(self, images, labels):
        """Forward only: the profiler's counts of backward operations do not cover them all."""
        try:
            from tensorflow.compat.v1 import profiler

            graph = self._once("forward", self._loss).get_concrete_function().graph
            options = profiler.ProfileOptionBuilder.float_operation()
            options["output"] = "none"
            counts = profiler.profile(graph, cmd="op", options=options)
        except (ImportError, AttributeError):
            return {"forward": None, "backward": None}
        total, node = 0, counts
        while node.children:
            node = node.children[0]
            total += node.float_ops if node.name in ("Conv2D", "MatMul") else 0
        return {"forward": total // self._batch, "backward": None}

    def shapes(self, images):
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
            self._found_shapes[name] = shape[-1:] + shape[:-1]
        return x

    def _loss(self, images, labels):
        return mean_loss(self._forward(images, True), labels)

    def _loss_and_gradients(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self._loss(images, labels)
        return loss, tape.gradient(loss, list(self._weights.values()))

    def _whole_step(self, images, labels):
        loss, gradients = self._loss_and_gradients(images, labels)
        for variable, gradient in zip(self._weights.values(), gradients):
            variable.assign_sub(self._learning_rate * gradient)
        return loss

    def _evaluate(self, images, labels):
        with tf.GradientTape() as tape:
            outputs = self._forward(images, False)
            loss = mean_loss(outputs, labels)
        return loss, outputs, tape.gradient(loss, list(self._weights.values()))

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

    def _empty_call(self, inputs):
        """A graph that hands back the first of that many inputs, whatever their shapes."""
        key = "nothing", inputs
        if key not in self._traced:
            specs = [tf.TensorSpec(None, tf.float32)] * inputs
            self._traced[key] = tf.function(lambda values: values[0], autograph=False).get_concrete_function(specs)
        return self._traced[key]

    def _once(self, name, python_function):
        """The graph of that name, traced the first time it is asked for."""
        if name not in self._traced:
            self._traced[name] = self._function(python_function)
            self._traced[name].get_concrete_function()
        return self._traced[name]

    def _function(self, python_function):
        return tf.function(python_function, input_signature=self._signature, autograph=False)

    def _ours(self, name, values):
        return self._orders[name][0](values) if name in self._orders else values

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of tensors in our layout."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
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


def mean_loss(outputs, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs))


def loss_gradient(outputs, labels):
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = mean_loss(outputs, labels)
    return tape.gradient(loss, outputs)
