"""ONNX Runtime 1.19, the last release that trains: its on-device training API. See adapters/__init__.py.

The network is an ONNX graph of opset 17, from which ONNX Runtime derives the gradients (`generate_artifacts`); one
session runs forward and backward (`Module`), another the update (`Optimizer`, plain SGD). Local response normalisation
is composed, since its operator has no gradient: the mean of `size` squares is an average pooling along the channels.
The nodes of layer n are named layer_n/..., and so are the gradients' nodes that come of them.

The package around the training API imports torch, for parts that are not used here, so its modules are loaded without
it.
"""

import glob
import json
import os
import re
import shutil
import sys
import tempfile
import time
import types

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

_PACKAGE = types.ModuleType("onnxruntime.training")
_PACKAGE.__path__ = [os.path.join(os.path.dirname(onnxruntime.__file__), "training")]
sys.modules["onnxruntime.training"] = onnxruntime.training = _PACKAGE
from onnxruntime.training import artifacts  # noqa: E402
from onnxruntime.training.api import CheckpointState, Module, Optimizer  # noqa: E402

CHANNELS_LAST = False

OPSET = 17

PROFILED_RUNS = 3
LAYER = re.compile(r"layer_(\d+)/")
"""Whose a node is, by its name."""


def versions():
    return {"framework": onnxruntime.__version__, "blas": "MLAS"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %r: this build of ONNX Runtime trains on the CPU" % device)
    onnxruntime.set_default_logger_severity(3)
    onnxruntime.set_seed(seed)
    return Trainer(network, weights, batch, threads, learning_rate)


class Graph(object):
    """The nodes of one network. `add` puts one in and returns its output's name."""

    def __init__(self, batch, training):
        self.batch = batch
        self.training = training
        self.nodes = []
        self.prefix = ""

    def add(self, op, inputs, outputs=1, **attributes):
        name = "%s%s_%d" % (self.prefix, op, len(self.nodes))
        names = ["%s_output%d" % (name, number) for number in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=name, **attributes))
        return names[0]

    def constant(self, value, dtype=np.float32):
        return self.add("Constant", [], value=numpy_helper.from_array(np.array(value, dtype)))

    def reshape(self, x, *shape):
        return self.add("Reshape", [x, self.constant(shape, np.int64)])


def window(s):
    top, bottom, left, right = s["pad"]
    return {"kernel_shape": s["kernel"], "strides": s["stride"], "pads": [top, left, bottom, right]}


def lrn(g, layer, x):
    s = layer["settings"]
    channels, height, width = layer["in_shapes"][0]
    if s["size"] % 2 == 0:
        raise NotImplementedError("layer %s: an even size has no middle channel" % layer["name"])
    squares = g.reshape(g.add("Mul", [x, x]), g.batch, 1, channels, height * width)
    half = s["size"] // 2
    pool = {"kernel_shape": [s["size"], 1], "pads": [half, 0, half, 0], "count_include_pad": 1}
    means = g.reshape(g.add("AveragePool", [squares], **pool), g.batch, channels, height, width)
    scale = g.add("Add", [g.add("Mul", [means, g.constant(s["alpha"])]), g.constant(s["k"])])
    return g.add("Div", [x, g.add("Pow", [scale, g.constant(s["beta"])])])


def linear(g, x, weight, bias):
    return g.add("Add", [g.add("MatMul", [x, weight]), bias])


def lstm(g, layer, x, w):
    hidden = layer["out_shape"][1]
    bias = g.add("Concat", [w[2], g.constant(np.zeros((1, 4 * hidden)))], axis=1)
    time_first = g.add("Transpose", [x], perm=[1, 0, 2])
    zeros = g.constant(np.zeros((1, g.batch, hidden)))
    # All inputs, also those that could be left out, since the gradient is told them by their position.
    states = g.add("LSTM", [time_first, w[0], w[1], bias, "", zeros, zeros, ""], 3, hidden_size=hidden)
    squeezed = g.add("Squeeze", [states, g.constant([1], np.int64)])
    return g.add("Transpose", [squeezed], perm=[1, 0, 2])


def attention(g, layer, x, w):
    steps, features = layer["out_shape"]
    heads = layer["settings"]["heads"]
    width = features // heads
    mixed = g.reshape(linear(g, x, w[0], w[1]), g.batch, steps, 3, heads, width)
    mixed = g.add("Transpose", [mixed], perm=[2, 0, 3, 1, 4])
    query, key, value = (g.add("Gather", [mixed, g.constant(n, np.int64)], axis=0) for n in range(3))
    scores = g.add("MatMul", [query, g.add("Transpose", [key], perm=[0, 1, 3, 2])])
    shares = g.add("Softmax", [g.add("Mul", [scores, g.constant(width**-0.5)])], axis=-1)
    joined = g.add("Transpose", [g.add("MatMul", [shares, value])], perm=[0, 2, 1, 3])
    return linear(g, g.reshape(joined, g.batch, steps, features), w[2], w[3])


def operation(g, layer, x, w):
    """Put one layer into graph `g`, fed by the names `x`, with parameters named `w`. Returns its output's name."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        return g.add("Conv", [x[0], *w], group=s["groups"], **window(s))
    if kind == "dense":
        return g.add("Gemm", [x[0], *w], transB=1)
    if kind == "token_dense":
        return linear(g, x[0], w[0], w[1]) if len(w) > 1 else g.add("MatMul", [x[0], w[0]])
    if kind == "relu":
        return g.add("Relu", x)
    if kind == "sigmoid":
        return g.add("Sigmoid", x)
    if kind == "gelu":
        erf = g.add("Erf", [g.add("Div", [x[0], g.constant(2**0.5)])])
        return g.add("Mul", [g.add("Mul", [x[0], g.add("Add", [erf, g.constant(1)])]), g.constant(0.5)])
    if kind == "max_pool":
        return g.add("MaxPool", x, **window(s))
    if kind == "avg_pool":
        return g.add("AveragePool", x, count_include_pad=1, **window(s))
    if kind == "global_avg_pool":
        return g.add("Flatten", [g.add("GlobalAveragePool", x)])
    if kind == "lrn":
        return lrn(g, layer, x[0])
    if kind == "dropout":
        if not g.training:
            return g.add("Identity", x)
        # The mask, too, since the gradient reads it.
        return g.add("Dropout", [x[0], g.constant(s["rate"]), g.constant(True, np.bool_)], 2)
    if kind == "batch_norm":
        channels = layer["out_shape"][0]
        running = [g.constant(np.zeros(channels)), g.constant(np.ones(channels))]
        return g.add("BatchNormalization", x + w + running, 3, epsilon=s["epsilon"], training_mode=1)
    if kind == "add":
        total = x[0]
        for other in x[1:]:
            total = g.add("Add", [total, other])
        return total
    if kind == "concat":
        return g.add("Concat", x, axis=1)
    if kind == "flatten":
        return g.add("Flatten", x)
    if kind == "embedding":
        return g.add("Gather", [w[0], x[0]])
    if kind == "position":
        return g.add("Add", [x[0], w[0]])
    if kind == "lstm":
        return lstm(g, layer, x[0], w)
    if kind == "last":
        return g.add("Gather", [x[0], g.constant(layer["in_shapes"][0][0] - 1, np.int64)], axis=1)
    if kind == "mean_steps":
        return g.add("ReduceMean", x, axes=[1], keepdims=0)
    if kind == "layer_norm":
        # Mean and deviation, too, since the gradient reads them.
        return g.add("LayerNormalization", x + w, 3, epsilon=s["epsilon"])
    if kind == "attention":
        return attention(g, layer, x[0], w)
    raise NotImplementedError("layer %s: kind %r is unknown to this adapter" % (layer["name"], kind))


def gates(values, order):
    """The four blocks along the first axis in another order."""
    blocks = np.split(values, 4)
    return np.concatenate([blocks[number] for number in order])


def to_onnx(values):
    """Gates input, forget, cell, output to ONNX's input, output, forget, cell, with an axis for the direction."""
    return gates(values, (0, 3, 1, 2))[None]


def from_onnx(values):
    return gates(values[0], (0, 2, 3, 1))


def weight_orders(network):
    """{parameter: (function from the description's layout to ours, and back)} for those that differ."""
    orders = {}
    for layer in network["layers"]:
        names = [parameter["name"] for parameter in layer["parameters"]]
        if layer["kind"] == "token_dense":
            orders[names[0]] = (np.transpose, np.transpose)
        elif layer["kind"] == "attention":
            orders[names[0]] = orders[names[2]] = (np.transpose, np.transpose)
        elif layer["kind"] == "lstm":
            orders.update((name, (to_onnx, from_onnx)) for name in names)
    return orders


class Trainer(object):
    def __init__(self, network, weights, batch, threads, learning_rate):
        self._network = network
        self._batch = batch
        self._threads = threads
        self._orders = weight_orders(network)
        self._names = list(weights)
        self._forward = self._evaluated = None
        values = {name: self._orders[name][0](a) if name in self._orders else a for name, a in weights.items()}
        self._shapes = {name: a.shape for name, a in values.items()}
        self._folder = tempfile.mkdtemp(prefix="steptime-")
        self._state, self._module = self._made(values, True)
        self._optimizer = Optimizer(os.path.join(self._folder, "optimizer_model.onnx"), self._module)
        self._optimizer.set_learning_rate(learning_rate)

    def __del__(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def step(self, images, labels):
        loss = self._module(images, labels)
        self._optimizer.step()
        self._module.lazy_reset_grad()
        return float(loss)

    def phases(self, images, labels):
        """Forward is a session's of its own, its weights fed in as in training; backward = training's - forward.

        backward is 0 where noise makes the difference negative. h2d is 0: the sessions read the arrays where they are.
        """
        if self._forward is None:
            self._forward = onnxruntime.InferenceSession(
                self._loss_model().SerializeToString(), self._options(), ["CPUExecutionProvider"]
            )
        binding = self._forward.io_binding()
        feeds = {name: self._state.parameters[name].data for name in self._names}
        for name, values in dict(feeds, input=images, labels=labels).items():
            binding.bind_cpu_input(name, values)
        binding.bind_output("loss")
        times = [time.perf_counter()]
        for call in (
            lambda: self._forward.run_with_iobinding(binding),
            lambda: self._module(images, labels),
            self._optimizer.step,
        ):
            call()
            times.append(time.perf_counter())
        self._module.lazy_reset_grad()
        forward, both, update = (end - start for start, end in zip(times, times[1:]))
        return {"h2d": 0.0, "forward": forward, "backward": max(0.0, both - forward), "update": update}

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter name: gradient in our layout}).

        Of the third run of forward and backward in a session that keeps a profile: the seconds in each layer's nodes.
        What lies between the nodes is in no layer. Where ONNX Runtime joins nodes of several layers in one kernel, its
        seconds are one layer's.
        """
        events, module = self._profiled(images, labels)
        found = {name: np.array(self._state.parameters[name].grad) for name in self._names}
        module.lazy_reset_grad()
        self._module.lazy_reset_grad()
        del module
        return self._attributed(events())[0], found

    def profiled_step(self, images, labels):
        """A whole step whose forward and backward keep a profile, read as in layer_by_layer.

        `dispatch` is the rest of the session's run, less what its records cost: a node has three, and nothing runs
        between the first and the second. The update is the optimizer's own session, timed from outside.
        """
        events, module = self._profiled(images, labels)
        # An optimizer keeps to the gradients of the module it was made with, from its first step on.
        optimizer = Optimizer(os.path.join(self._folder, "optimizer_model.onnx"), module)
        for rate in (0.0, self._optimizer.get_learning_rate()):
            optimizer.set_learning_rate(rate)
            start = time.perf_counter()
            optimizer.step()
        update_s = time.perf_counter() - start
        module.lazy_reset_grad()
        self._module.lazy_reset_grad()
        del module
        layers, parts = self._attributed(events())
        return {"layers": layers, "parts": dict(parts, h2d=0.0, update=update_s)}

    def _profiled(self, images, labels):
        """(a function that gives the events once the module is gone, the module after the last of its runs)."""
        options = self._options()
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(self._folder, "profile")
        module = Module(os.path.join(self._folder, "training_model.onnx"), self._state, session_options=options)
        for _ in range(PROFILED_RUNS):
            module.lazy_reset_grad()
            module(images, labels)

        def events():
            # Written when its session ends. A module opens two files, named by the second; one stays empty.
            paths = sorted(glob.glob(options.profile_file_prefix + "*"), key=os.path.getsize)
            with open(paths[-1]) as file:
                found = json.load(file)
            for path in paths:
                os.remove(path)
            return found

        return events, module

    def gradients(self, images, labels):
        values = {name: self._state.parameters[name].data for name in self._names}
        state, module = self._made(values, False)
        loss, outputs = module(images, labels)
        found = {name: np.array(state.parameters[name].grad) for name in self._names}
        return dict(self.arrays(found), outputs=outputs, loss=loss)

    def arrays(self, tensors):
        """{parameter: array in the description's layout} of arrays in our layout."""
        return {name: self._orders[name][1](a) if name in self._orders else a for name, a in tensors.items()}

    def flops(self, images, labels):
        """ONNX Runtime counts none."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        """As ONNX infers them."""
        model, names = self._model(None, True)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
        known = {
            value.name: value.type.tensor_type.shape for value in list(inferred.value_info) + list(inferred.output)
        }
        return {layer: [d.dim_value for d in known[name].dim[1:]] for layer, name in names.items()}

    def parameter_count(self):
        return int(self._module.get_parameters_size())

    def device_peak_bytes(self):
        return None

    def _options(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        return options

    def _model(self, values, training):
        """(the network as ONNX, {layer: its output's name}); weights are its inputs where `values` is None."""
        g, outputs = Graph(self._batch, training), {"input": "input"}
        for number, layer in enumerate(self._network["layers"]):
            g.prefix = "layer_%d/" % number
            names = [parameter["name"] for parameter in layer["parameters"]]
            outputs[layer["name"]] = operation(g, layer, [outputs[source] for source in layer["inputs"]], names)
        last = self._network["layers"][-1]["name"]
        g.nodes[-1].output[0] = outputs[last] = "outputs"
        kind = TensorProto.INT64 if self._network["vocabulary"] else TensorProto.FLOAT
        inputs = [helper.make_tensor_value_info("input", kind, [self._batch, *self._network["input_shape"]])]
        initial = []
        if values is None:
            inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in self._shapes.items()]
        else:
            initial = [numpy_helper.from_array(np.array(a, order="C"), name) for name, a in values.items()]
        shape = [self._batch, self._network["classes"]]
        ends = [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, shape)]
        graph = helper.make_graph(g.nodes, self._network["name"], inputs, ends, initial)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        outputs.pop("input")
        return model, outputs

    def _loss_model(self):
        """The network and its loss, weights being inputs."""
        model = self._model(None, True)[0]
        graph = model.graph
        graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["outputs", "labels"], ["loss"], name="loss"))
        graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, [self._batch]))
        graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
        return model

    def _made(self, values, training):
        """(state, module) of the network with these weights; its files lie in a folder of their own if not training."""
        folder = self._folder if training else tempfile.mkdtemp(prefix="steptime-")
        try:
            artifacts.generate_artifacts(
                self._model(values, training)[0],
                requires_grad=self._names,
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType.SGD if training else None,
                artifact_directory=folder,
                additional_output_names=None if training else ["outputs"],
            )
            state = CheckpointState.load_checkpoint(os.path.join(folder, "checkpoint"))
            path = os.path.join(folder, "training_model.onnx")
            return state, Module(path, state, session_options=self._options())
        finally:
            if not training:
                shutil.rmtree(folder)

    def _attributed(self, events):
        """(layer times, {"loss", "other", "dispatch": seconds}) of the last run."""
        layers = self._network["layers"]
        spent = {"forward": [0.0] * len(layers), "backward": [0.0] * len(layers)}
        parts = {"loss": 0.0, "other": 0.0}
        nodes, before = of_last_run(events, "_kernel_time"), of_last_run(events, "_fence_before")
        for event in nodes:
            found, name, seconds = LAYER.search(event["name"]), event["name"].lower(), event["dur"] * 1e-6
            if found:
                spent["backward" if "_grad" in name else "forward"][int(found.group(1))] += seconds
            else:
                parts["loss" if "softmaxcrossentropy" in name else "other"] += seconds
        run_s = [event["dur"] for event in events if event["name"] == "SequentialExecutor::Execute"][-1] * 1e-6
        records_s = 3e-6 * sum(node["ts"] - first["ts"] for node, first in zip(nodes, before))
        parts["dispatch"] = max(0.0, run_s - sum(event["dur"] for event in nodes) * 1e-6 - records_s)
        times = [
            {"layer": layer["name"], "forward_s": forward_s, "backward_s": backward_s}
            for layer, forward_s, backward_s in zip(layers, spent["forward"], spent["backward"])
        ]
        return times, parts


def of_last_run(events, ending):
    """The nodes' events with names that end so, of the last of the profiled runs."""
    found = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(ending)]
    return found[-(len(found) // PROFILED_RUNS) :]
