"""Synchronous training of many workers in one process of one framework: what its distributed engine must give.

Run by the framework's interpreter with JSON on stdin: network, batch, seed, learning_rate, mode, adapter, worker,
steps, workers (a list), out (a folder). Written are the mean gradients of each step, WORKERS-STEP.npz. Standard
library, numpy and the framework only; Python >= 3.6.
"""

import importlib.util
import json
import os
import sys

import numpy as np


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(job, adapter, worker, workers):
    network, batch, seed = job["network"], job["batch"], job["seed"]
    shape, classes = network["input_shape"], network["classes"]
    pools = [worker.Images(shape, classes, batch, seed + rank, adapter.CHANNELS_LAST) for rank in range(workers)]
    weights = worker.initial_weights(network, seed)
    for step in range(job["steps"]):
        trainer = adapter.build(network, weights, batch, 1, job["learning_rate"], seed, "cpu", "float32", job["mode"])
        found = [trainer.gradients(*pool.read()) for pool in pools]
        mean = {name: np.mean([each[name].astype(float) for each in found], 0) for name in weights}
        np.savez(os.path.join(job["out"], "%d-%d.npz" % (workers, step)), **mean)
        weights = {
            name: (values - job["learning_rate"] * mean[name]).astype(np.float32) for name, values in weights.items()
        }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    modules = [loaded(name, given[name]) for name in ("adapter", "worker")]
    for each in given["workers"]:
        train(given, *modules, each)
