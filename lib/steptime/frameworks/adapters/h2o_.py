"""H2O 3.46, inference only: multi-layer perceptrons with ReLU, scored by a Java server of its own on loopback.

Why it does not train here: H2O's DeepLearning moves its weights after every row, whatever `mini_batch_size` says (3.46
gives the same weights for 1, 16 and 64), and takes the rows in an order of its own, several threads without a lock. The
step that is compared, one update by the mean gradient of a batch, cannot be had from it, nor a gradient or a time of a
part of it. Its outputs can: initial weights are taken as given. See adapters/__init__.py.
"""

import atexit
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import h2o
import numpy as np
from h2o.estimators import H2ODeepLearningEstimator

CHANNELS_LAST = False
INFERENCE_ONLY = True

PR_SET_PDEATHSIG = 1
START_S = 120
NO_LEARNING = 1e-30
"""A rate that leaves float32 weights as they are; 0 is refused."""


def versions():
    java = subprocess.run(["java", "-version"], stderr=subprocess.PIPE, check=True).stderr.decode()
    return {"framework": h2o.__version__, "blas": "none: loops on Java %s" % re.search('"(.+?)"', java).group(1)}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if device != "cpu":
        raise NotImplementedError("device = %r: H2O's DeepLearning runs on the CPU" % device)
    layers = dense_layers(network)
    return Trainer(network, layers, weights, connected(threads))


def dense_layers(network):
    """The dense layers of a perceptron: flatten, dense, ReLU, dropout, ..., dense. Dropout is idle in inference."""
    found, kinds = [], []
    for layer in network["layers"]:
        if layer["kind"] not in ("flatten", "dense", "relu", "dropout"):
            raise NotImplementedError(
                "layer %s: H2O's DeepLearning has dense layers with ReLU only, no %s" % (layer["name"], layer["kind"])
            )
        if layer["kind"] != "dropout":
            kinds.append(layer["kind"])
        if layer["kind"] == "dense":
            if len(layer["parameters"]) == 1:
                raise NotImplementedError("layer %s: H2O's dense layers have a bias" % layer["name"])
            found.append(layer)
    if kinds != ["flatten"] + ["dense", "relu"] * (len(found) - 1) + ["dense"]:
        raise NotImplementedError(
            "layer %s: H2O's DeepLearning is a chain of dense layers, ReLU after each but the last" % found[-1]["name"]
        )
    return found


_SERVERS = {}


def connected(threads):
    """Start a server with so many threads, which ends with this process, unless this process has one."""
    if threads in _SERVERS:
        return _SERVERS[threads]
    if _SERVERS:
        raise ValueError("threads = %d: this process' H2O server has %d" % (threads, next(iter(_SERVERS))))
    folder, port = tempfile.mkdtemp(prefix="steptime-h2o-"), free_port()
    jar = os.path.join(os.path.dirname(h2o.__file__), "backend", "bin", "h2o.jar")
    command = ["java", "-Xmx4g", "-XX:ActiveProcessorCount=%d" % threads, "-jar", jar]
    command += ["-ip", "127.0.0.1", "-web_ip", "127.0.0.1", "-port", str(port), "-nthreads", str(threads)]
    command += ["-name", "steptime-%d" % os.getpid(), "-ice_root", folder, "-log_level", "ERRR"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
    _SERVERS[threads] = process
    atexit.register(shutil.rmtree, folder, True)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    end = time.monotonic() + START_S
    while True:
        try:
            h2o.connect(url="http://127.0.0.1:%d" % port, verbose=False)
            break
        except Exception:
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.5)
    h2o.no_progress()
    return process


def end_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port():
    """A port that is free with the one after it, which H2O takes, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def frame(values):
    """The rows in the server's memory."""
    return h2o.H2OFrame(values.tolist(), column_names=["x%d" % number for number in range(values.shape[1])])


class Trainer(object):
    def __init__(self, network, layers, weights, server):
        self._network = network
        self._server = server
        self._layers = layers
        names = [[parameter["name"] for parameter in layer["parameters"]] for layer in self._layers]
        self._weights = [(weights[weight], weights[bias]) for weight, bias in names]
        self._model = self._trained(self._weights)

    def phases(self, images, labels):
        """h2d: the batch as a frame of the server's. forward: one request that scores it, there and back."""
        start = time.perf_counter()
        rows = frame(images.reshape(len(images), -1))
        sent = time.perf_counter()
        answer = self._predicted(self._model, rows)
        end = time.perf_counter()
        for key in (rows.frame_id, answer):
            h2o.remove(key)
        return {"h2d": sent - start, "forward": end - sent}

    def gradients(self, images, labels):
        """Outputs and loss only. H2O hands out softmax(outputs).

        With one class more, whose weights are 0 and so its output, outputs are the logarithms over that class' one.
        """
        *hidden, (weight, bias) = self._weights
        wider = self._trained([*hidden, (np.vstack([weight, 0 * weight[:1]]), np.append(bias, 0 * bias[:1]))])
        logarithms = np.log(self._shares(wider, images, len(bias) + 1))
        shares = self._shares(self._model, images, len(bias))
        loss = -np.log(shares[np.arange(len(labels)), labels]).mean()
        return {"outputs": logarithms[:, :-1] - logarithms[:, -1:], "loss": np.float64(loss)}

    def flops(self, images, labels):
        """H2O counts none."""
        return {"forward": None, "backward": None}

    def shapes(self, images):
        """Of the dense layers as H2O sums them up; of those between, which it has no names for, what these imply."""
        units = [int(row[2]) for row in self._model._model_json["output"]["model_summary"].cell_values]
        found, current = {}, units.pop(0)
        for layer in self._network["layers"]:
            if layer["kind"] == "dense":
                current = units.pop(0)
            found[layer["name"]] = [current]
        return found

    def parameter_count(self):
        return sum(
            self._model.weights(n).nrow * self._model.weights(n).ncol + self._model.biases(n).nrow
            for n in range(len(self._layers))
        )

    def device_peak_bytes(self):
        """The server's, since it holds the network."""
        with open("/proc/%d/status" % self._server.pid) as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

    def _trained(self, weights):
        """A model with these weights: trained at a rate that moves none, on a row of zeros for each class."""
        classes, features = len(weights[-1][1]), weights[0][0].shape[1]
        rows = frame(np.hstack([np.zeros((classes, features)), np.arange(classes)[:, None]]))
        rows[-1] = rows[-1].asfactor()
        model = H2ODeepLearningEstimator(
            hidden=[len(bias) for _, bias in weights[:-1]],
            activation="rectifier",
            initial_weights=[frame(weight) for weight, _ in weights],
            initial_biases=[frame(bias[:, None]) for _, bias in weights],
            adaptive_rate=False,
            rate=NO_LEARNING,
            epochs=1,
            standardize=False,
            ignore_const_cols=False,
            overwrite_with_best_model=False,
            variable_importances=False,
            export_weights_and_biases=True,
            stopping_rounds=0,
        )
        model.train(x=rows.columns[:-1], y=rows.columns[-1], training_frame=rows)
        return model

    def _predicted(self, model, rows):
        """The key of the predictions, by one request; model.predict would look for the end of a job now and then."""
        path = "POST /3/Predictions/models/%s/frames/%s" % (model.model_id, rows.frame_id)
        return h2o.api(path)["predictions_frame"]["name"]

    def _shares(self, model, images, classes):
        rows = frame(images.reshape(len(images), -1))
        table = h2o.get_frame(self._predicted(model, rows)).as_data_frame(use_pandas=False)
        columns = [table[0].index("p%d" % number) for number in range(classes)]
        return np.array([[float(row[column]) for column in columns] for row in table[1:]])
