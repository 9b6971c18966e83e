"""TensorFlow 1.14: one graph, one Session.run a step, the batch by feed_dict. See adapters/__init__.py.

Images and activations are channels-last inside, since convolutions of the CPU build know no other layout; weights are
transposed when they are loaded and gradients when they are handed out, among them the dense weights after a flatten,
whose features are numbered channels-first outside. Padding is "SAME" or "VALID" where that is what is described, and
an operation of its own where it is not: this version's pooling has no explicit padding. Grouped convolutions are one
convolution a group, joined: their kernels came later. An LSTM is contrib's block of all steps (its gates are in the
order input, cell, forget, output).

The forward operations of layer n are under the name layer_n/forward, its gradients under layer_n/backward. Gradients
are made layer by layer with tf.gradients, which gives the operations that one call for the whole network gives.
"""

import os
import re
import time
import warnings

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    # numpy's warnings about the types that this TensorFlow registers with it.
    warnings.simplefilter("ignore")
    import tensorflow as tf
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import gen_nn_ops

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)

CHANNELS_LAST = True

MULTIPLYING = ("Conv2D", "MatMul")
UNCOUNTED = ("BatchMatMul", "BatchMatMulV2", "BlockLSTM")
"""The operations whose own counts flops() sums."""


CHAIN, CHAINS = 200, 15
SCOPE = re.compile(r"layer_(\d+)/(forward|backward)/")
"""Whose an operation is, by its name."""


def versions():
    return {"framework": tf.__version__, "blas": "oneDNN" if tf.pywrap_tensorflow.IsMklEnabled() else "Eigen"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %r: the builds of TensorFlow 1.14 need CUDA 10.0" % device)
    return Trainer(network, weights, batch, threads, learning_rate, seed)


def same_padding(length, kernel, stride):
    """What "SAME" adds (before, after)."""
    total = max(0, (-(-length // stride) - 1) * stride + kernel - length)
    return total // 2, total - total // 2


def padding(layer, value):
    """(the operation's own padding, function that pads before it) for the described padding with `value`."""
    s = layer["settings"]
    pad = [tuple(s["pad"][:2]), tuple(s["pad"][2:])]
    if pad == [(0, 0), (0, 0)]:
        return "VALID", lambda x: x
    _, height, width = layer["in_shapes"][0]
    if pad == [same_padding(*edge) for edge in zip((height, width), s["kernel"], s["stride"])]:
        return "SAME", lambda x: x
    return "VALID", lambda x: tf.pad(x, [(0, 0), *pad, (0, 0)], constant_values=value)


def convolution(layer):
    s = layer["settings"]
    how, before = padding(layer, 0)
    strides = [1, *s["stride"], 1]

    def run(x, w, training):
        padded = before(x[0])
        if s["groups"] == 1:
            y = tf.nn.conv2d(padded, w[0], strides, how)
        else:
            parts = zip(tf.split(padded, s["groups"], 3), tf.split(w[0], s["groups"], 3))
            y = tf.concat([tf.nn.conv2d(a, b, strides, how) for a, b in parts], 3)
        return tf.nn.bias_add(y, w[1]) if s["bias"] else y

    return run


def pooling(layer, function, value, may_be_same):
    s = layer["settings"]
    how, before = padding(layer, value)
    if how == "SAME" and not may_be_same:
        # The kernel would leave the padding out of the mean.
        edges = [(0, 0), tuple(s["pad"][:2]), tuple(s["pad"][2:]), (0, 0)]
        how, before = "VALID", lambda x: tf.pad(x, edges)
    kernel, strides = [1, *s["kernel"], 1], [1, *s["stride"], 1]
    return lambda x, w, training: function(before(x[0]), kernel, strides, how)


def linear(x, weight, bias):
    """x @ weight + bias over the last axis of (batch, features) or (batch, steps, features)."""
    shape = x.shape.as_list()
    y = tf.matmul(tf.reshape(x, (-1, shape[-1])) if len(shape) > 2 else x, weight)
    y = y if bias is None else tf.nn.bias_add(y, bias)
    return tf.reshape(y, [*shape[:-1], -1]) if len(shape) > 2 else y


def lstm(x, w, training):
    from tensorflow.contrib.rnn.python.ops import lstm_ops

    batch, steps, _ = x[0].shape.as_list()
    hidden = w[1].shape.as_list()[0]
    zeros, peephole = tf.zeros((batch, hidden)), tf.zeros((hidden,))
    outputs = lstm_ops.gen_lstm_ops.block_lstm(
        seq_len_max=tf.constant(steps, tf.int64),
        x=tf.transpose(x[0], (1, 0, 2)),
        cs_prev=zeros,
        h_prev=zeros,
        w=tf.concat([w[0], w[1]], 0),
        wci=peephole,
        wcf=peephole,
        wco=peephole,
        b=w[2],
        forget_bias=0.0,
        cell_clip=-1.0,
        use_peephole=False,
    )
    return tf.transpose(outputs.h, (1, 0, 2))


def attention(layer):
    heads = layer["settings"]["heads"]

    def run(x, w, training):
        batch, steps, features = x[0].shape.as_list()
        mixed = tf.reshape(linear(x[0], w[0], w[1]), (batch, steps, 3, heads, features // heads))
        query, key, value = tf.unstack(tf.transpose(mixed, (2, 0, 3, 1, 4)))
        scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * (features // heads) ** -0.5)
        joined = tf.transpose(tf.matmul(scores, value), (0, 2, 1, 3))
        return linear(tf.reshape(joined, (batch, steps, features)), w[2], w[3])

    return run


def layer_norm(layer):
    epsilon = layer["settings"]["epsilon"]

    def run(x, w, training):
        mean, variance = tf.nn.moments(x[0], [-1], keep_dims=True)
        return tf.nn.batch_normalization(x[0], mean, variance, w[1], w[0], epsilon)

    return run


def operation(layer):
    """The function (inputs, weights, training) -> output of one layer."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        return convolution(layer)
    if kind in ("dense", "token_dense"):
        return lambda x, w, training: linear(x[0], w[0], w[1] if len(w) > 1 else None)
    if kind == "relu":
        return lambda x, w, training: tf.nn.relu(x[0])
    if kind == "sigmoid":
        return lambda x, w, training: tf.sigmoid(x[0])
    if kind == "gelu":
        return lambda x, w, training: x[0] * (0.5 * (1 + tf.erf(x[0] * 0.5**0.5)))
    if kind == "max_pool":
        return pooling(layer, tf.nn.max_pool, float("-inf"), True)
    if kind == "avg_pool":
        return pooling(layer, tf.nn.avg_pool, 0, False)
    if kind == "global_avg_pool":
        return lambda x, w, training: tf.reduce_mean(x[0], (1, 2))
    if kind == "lrn":
        # Here alpha is not divided by size.
        radius, alpha = s["size"] // 2, s["alpha"] / s["size"]
        return lambda x, w, training: tf.nn.local_response_normalization(x[0], radius, s["k"], alpha, s["beta"])
    if kind == "dropout":
        return lambda x, w, training: tf.nn.dropout(x[0], rate=s["rate"]) if training else tf.identity(x[0])
    if kind == "batch_norm":
        # The raw operation: tf.nn.fused_batch_norm would raise an epsilon of 1e-5.
        none = np.zeros(0, np.float32)
        return lambda x, w, training: (
            gen_nn_ops.fused_batch_norm_v2(x[0], w[0], w[1], none, none, epsilon=s["epsilon"], is_training=True).y
        )
    if kind == "add":
        return lambda x, w, training: tf.add_n(x)
    if kind == "concat":
        return lambda x, w, training: tf.concat(x, 3)
    if kind == "flatten":
        return lambda x, w, training: tf.reshape(x[0], (-1, layer["out_shape"][0]))
    if kind == "embedding":
        return lambda x, w, training: tf.nn.embedding_lookup(w[0], x[0])
    if kind == "position":
        return lambda x, w, training: x[0] + w[0]
    if kind == "lstm":
        return lstm
    if kind == "last":
        return lambda x, w, training: x[0][:, -1]
    if kind == "mean_steps":
        return lambda x, w, training: tf.reduce_mean(x[0], 1)
    if kind == "layer_norm":
        return layer_norm(layer)
    if kind == "attention":
        return attention(layer)
    raise NotImplementedError("layer %s: kind %r is unknown to this adapter" % (layer["name"], kind))


def swapped_gates(values):
    """Gates input, forget, cell, output to input, cell, forget, output along the first axis, or back."""
    first, second, third, fourth = np.split(values, 4)
    return np.concatenate([first, third, second, fourth])


def weight_orders(network):
    """{parameter: (function from the description's layout to ours, and back)} for those that differ."""
    orders, numbering = {}, {}
    for layer in network["layers"]:
        kind, source, names = layer["kind"], layer["inputs"][0], [p["name"] for p in layer["parameters"]]
        if kind == "flatten":
            shape = layer["in_shapes"][0]
            numbering[layer["name"]] = np.arange(np.prod(shape)).reshape(shape).transpose(1, 2, 0).ravel()
        elif kind in ("relu", "sigmoid", "dropout", "add"):
            # Element-wise layers between a flatten and its dense layer keep the numbering.
            if source in numbering:
                numbering[layer["name"]] = numbering[source]
        elif kind == "conv":
            orders[names[0]] = (lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))
        elif kind in ("dense", "token_dense"):
            orders[names[0]] = dense_order(numbering.get(source))
        elif kind == "attention":
            orders[names[0]] = orders[names[2]] = (np.transpose, np.transpose)
        elif kind == "lstm":
            orders[names[0]] = orders[names[1]] = (
                lambda a: swapped_gates(a).T,
                lambda a: swapped_gates(a.T),
            )
            orders[names[2]] = (swapped_gates, swapped_gates)
    return orders


def dense_order(numbering):
    if numbering is None:
        return np.transpose, np.transpose
    back = np.argsort(numbering)
    return lambda values: values.T[numbering], lambda values: values[back].T


def span_s(nodes):
    """Seconds from the first kernel's start to the last one's end."""
    starts = [node.all_start_micros + node.op_start_rel_micros for node in nodes]
    ends = [node.all_start_micros + node.op_end_rel_micros for node in nodes]
    return (max(ends) - min(starts)) * 1e-6


class Trainer(object):
    def __init__(self, network, weights, batch, threads, learning_rate, seed):
        self._network = network
        self._batch = batch
        self._learning_rate = learning_rate
        self._orders = weight_orders(network)
        self._operations = [operation(layer) for layer in network["layers"]]
        shape = network["input_shape"]
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device("/cpu:0"):
            tf.set_random_seed(seed)
            tokens = bool(network["vocabulary"])
            image_shape = list(shape) if tokens else [shape[1], shape[2], shape[0]]
            self._images = tf.placeholder(tf.int64 if tokens else tf.float32, [batch, *image_shape])
            self._labels = tf.placeholder(tf.int64, [batch])
            self._fed = tf.group(self._images, self._labels)
            # Values come by a feed: as constants they would stay in the graph, whose size is limited to 2 GiB.
            values = {name: self._orders[name][0](a) if name in self._orders else a for name, a in weights.items()}
            initial = {name: tf.placeholder(tf.float32, a.shape) for name, a in values.items()}
            self._weights = {name: tf.Variable(tensor) for name, tensor in initial.items()}
            self._outputs, self._loss, self._gradients = self._differentiated(True)
            optimizer = tf.train.GradientDescentOptimizer(learning_rate)
            with tf.name_scope("update"):
                pairs = [(self._gradients[name], variable) for name, variable in self._weights.items()]
                self._train = optimizer.apply_gradients(pairs)
            initializer = tf.global_variables_initializer()
        self._threads = threads
        self._session = tf.Session(graph=self._graph, config=self._config())
        self._session.run(initializer, {tensor: values[name] for name, tensor in initial.items()})
        self._evaluated = self._kept = self._trace_s = None

    def step(self, images, labels):
        return float(self._session.run([self._loss, self._train], self._feed(images, labels))[0])

    def phases(self, images, labels):
        """Of calls one after the other on this batch, a call running what it is asked for and all that comes before:

        h2d = a call that only takes the batch, forward = loss - h2d, backward = (loss and gradients) - loss, each 0
        where noise makes it negative; update = a call that applies those gradients, which the session has kept.
        """
        if self._kept is None:
            self._kept = self._keep_gradients(self._feed(images, labels))
        keep, holders, update = self._kept
        feed, seconds = self._feed(images, labels), [0.0]
        for wanted in (self._fed, self._loss.op, [self._loss.op, keep]):
            start = time.perf_counter()
            found = self._session.run(wanted, feed)
            seconds.append(time.perf_counter() - start)
        handles = {holder: kept.handle for holder, kept in zip(holders, found[1])}
        start = time.perf_counter()
        self._session.run(update, handles)
        update_s = time.perf_counter() - start
        h2d, forward, backward = (max(0.0, after - before) for before, after in zip(seconds, seconds[1:]))
        return {"h2d": h2d, "forward": forward, "backward": backward, "update": update_s}

    def _keep_gradients(self, feed):
        """(handles of gradients to fetch, placeholders for handles, the update of what those name)."""
        with self._graph.as_default(), tf.device("/cpu:0"), tf.name_scope("kept"):
            tensors = []
            for gradient in self._gradients.values():
                sparse = isinstance(gradient, tf.IndexedSlices)
                tensors += [gradient.values, gradient.indices] if sparse else [gradient]
            keep, holders, again = [tf.get_session_handle(tensor) for tensor in tensors], [], []
            for kept, tensor in zip(self._session.run(keep, feed), tensors):
                holder, value = tf.get_session_tensor(kept.handle, tensor.dtype)
                value.set_shape(tensor.shape)
                holders.append(holder)
                again.append(value)
            pairs, rest = [], iter(again)
            for name, gradient in self._gradients.items():
                value = next(rest)
                if isinstance(gradient, tf.IndexedSlices):
                    value = tf.IndexedSlices(value, next(rest), gradient.dense_shape)
                pairs.append((value, self._weights[name]))
            return keep, holders, tf.train.GradientDescentOptimizer(self._learning_rate).apply_gradients(pairs)

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter name: gradient in our layout}).

        Of one run of forward and backward, traced by the session: the seconds in the kernels of each layer. What lies
        between the kernels is in no layer. TensorFlow joins a convolution or a dense layer with the ReLU after it in
        one kernel: its seconds are the convolution's, and the ReLU's forward is 0.
        """
        # As a dict: a sparse gradient is handed out whole then.
        found, nodes = self._traced([self._loss, dict(self._gradients)], self._feed(images, labels))
        return self._attributed(nodes)[0], found[1]

    def profiled_step(self, images, labels):
        """A whole step, traced: as layer_by_layer, with the seconds in kernels of the loss, of the update, of others.

        `dispatch` is the time between the first kernel's start and the last one's end in which none runs, less what
        tracing was measured to add to a kernel, as often as there are kernels. `h2d` is a call that only takes the
        batch.
        """
        if self._trace_s is None:
            self._trace_s = self._seconds_of_a_trace()
        feed, start = self._feed(images, labels), time.perf_counter()
        self._session.run(self._fed, feed)
        call_s = time.perf_counter() - start
        nodes = self._traced([self._loss, self._train], feed)[1]
        layers, parts = self._attributed(nodes)
        running = sum(parts.values()) + sum(layer["forward_s"] + layer["backward_s"] for layer in layers)
        dispatch = max(0.0, span_s(nodes) - running - len(nodes) * self._trace_s)
        return {"layers": layers, "parts": dict(parts, h2d=call_s, dispatch=dispatch)}

    def _seconds_of_a_trace(self):
        """What tracing adds to a kernel: a chain of kernels on one number, traced, and called without, tells."""
        with self._graph.as_default(), tf.device("/cpu:0"), tf.name_scope("chain"):
            fed = tf.placeholder(tf.float32, (1, 2))
            # One of the few operations that the session neither leaves out nor joins with its like.
            chain = [tf.nn.softmax(fed)]
            for _ in range(CHAIN):
                chain.append(tf.nn.softmax(chain[-1]))
        differences, batch = [], np.ones((1, 2), np.float32)
        for _ in range(CHAINS):
            times = [time.perf_counter()]
            for last in (chain[0], chain[-1]):
                self._session.run(last.op, {fed: batch})
                times.append(time.perf_counter())
            nodes = self._traced(chain[-1].op, {fed: batch})[1]
            plain_s = times[2] - 2 * times[1] + times[0]
            differences.append((span_s(nodes) - plain_s) / len(nodes))
        return max(0.0, float(np.median(differences)))

    def _traced(self, wanted, feed):
        """(what was fetched, the nodes that the session ran, with their times)."""
        options, metadata = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), tf.RunMetadata()
        found = self._session.run(wanted, feed, options, metadata)
        return found, [node for device in metadata.step_stats.dev_stats for node in device.node_stats]

    def _attributed(self, nodes):
        """(layer times, {"loss", "update", "other": seconds})."""
        layers = self._network["layers"]
        numbers = {layer["name"]: number for number, layer in enumerate(layers)}
        spent = {"forward": [0.0] * len(layers), "backward": [0.0] * len(layers)}
        parts = {"loss": 0.0, "update": 0.0, "other": 0.0}
        for node in nodes:
            seconds = (node.op_end_rel_micros - node.op_start_rel_micros) * 1e-6
            scope, first = SCOPE.search(node.node_name), node.node_name.split("/")[0]
            if scope is None:
                parts[first if first in parts else "other"] += seconds
                continue
            number = int(scope.group(1))
            if "= _Fused" in node.timeline_label and not layers[number]["parameters"]:
                number = numbers[layers[number]["inputs"][0]]
            spent[scope.group(2)][number] += seconds
        times = []
        for layer, forward_s, backward_s in zip(layers, spent["forward"], spent["backward"]):
            times.append({"layer": layer["name"], "forward_s": forward_s, "backward_s": backward_s})
        return times, parts

    def gradients(self, images, labels):
        if self._evaluated is None:
            with self._graph.as_default(), tf.device("/cpu:0"), tf.name_scope("evaluation"):
                outputs, loss, gradients = self._differentiated(False)
                self._evaluated = {"outputs": outputs, "loss": loss}, gradients
        plain, gradients = self._session.run(self._evaluated, self._feed(images, labels))
        return dict(self.arrays(gradients), **plain)

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of gradients that a session handed out."""
        arrays = {}
        for name, values in tensors.items():
            if isinstance(values, tf.SparseTensorValue) or hasattr(values, "dense_shape"):
                dense = np.zeros(self._weights[name].shape.as_list(), np.float32)
                np.add.at(dense, values.indices, values.values)
                values = dense
            arrays[name] = self._orders[name][1](values) if name in self._orders else values
        return arrays

    def flops(self, images, labels):
        """Forward only, by the counts that tf.profiler sums: those of backward operations do not cover them all.

        None where products hide in operations that it does not count.
        """
        total = 0
        for op in self._graph.get_operations():
            if not op.name.startswith("layer_") or op.name.split("/")[1] != "forward":
                continue
            if op.type in UNCOUNTED:
                return {"forward": None, "backward": None}
            if op.type in MULTIPLYING:
                total += int(ops.get_stats_for_node_def(self._graph, op.node_def, "flops").value or 0)
        return {"forward": total // self._batch, "backward": None}

    def shapes(self, images):
        return self._shapes

    def parameter_count(self):
        return int(sum(np.prod(variable.shape.as_list()) for variable in self._weights.values()))

    def device_peak_bytes(self):
        return None

    def _config(self):
        """One operation after the other, each on so many threads."""
        return tf.ConfigProto(
            intra_op_parallelism_threads=self._threads,
            inter_op_parallelism_threads=1,
            device_count={"GPU": 0},
        )

    def _feed(self, images, labels):
        return {self._images: images, self._labels: labels}

    def _differentiated(self, training):
        """(outputs, loss, {parameter name: gradient}), with dropout where `training`."""
        outputs, trained, runs, self._shapes = {"input": self._images}, {"input": False}, [], {}
        for number, layer in enumerate(self._network["layers"]):
            name, sources = layer["name"], layer["inputs"]
            variables = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            inputs = [outputs[source] for source in sources]
            with tf.name_scope("layer_%d/forward" % number):
                output = outputs[name] = self._operations[number](inputs, variables, training)
            trained[name] = bool(variables) or any(trained[source] for source in sources)
            shape = output.shape.as_list()[1:]
            self._shapes[name] = [shape[2], shape[0], shape[1]] if len(shape) == 3 else shape
            runs.append((number, layer, inputs, variables, output))
        with tf.name_scope("loss"):
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._labels, logits=output)
            loss = tf.reduce_mean(losses)
            upstream, gradients = {name: [tf.gradients(loss, output)[0]]}, {}
        for number, layer, inputs, variables, output in reversed(runs):
            if trained[layer["name"]]:
                with tf.name_scope("layer_%d/backward" % number):
                    sums = upstream.pop(layer["name"])
                    above = tf.add_n(sums) if len(sums) > 1 else sums[0]
                    wanted = [number for number, source in enumerate(layer["inputs"]) if trained[source]]
                    targets = [inputs[number] for number in wanted] + variables
                    # Gated as TensorFlow's optimizers do: no weight is updated while another gradient reads it.
                    # Stopped, since one input of this layer may itself come from another.
                    found = tf.gradients(output, targets, above, gate_gradients=True, stop_gradients=inputs)
                for number, gradient in zip(wanted, found):
                    upstream.setdefault(layer["inputs"][number], []).append(gradient)
                names = [parameter["name"] for parameter in layer["parameters"]]
                gradients.update(zip(names, found[len(wanted) :]))
        return outputs[name], loss, gradients
