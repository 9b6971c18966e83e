"""Synchronous training of many workers in one process, without any communication: what the real schedules must give.

Run as a program with JSON on stdin: network, batch, seed, learning_rate, steps, adapter, worker, out (a folder), and a
list of cases {name, workers, rule: dense, sparse or local, ...}. Written are, for each case, the applied gradients of
each step, NAME-STEP.npz, and of local SGD the weights at the end, NAME.npz.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(arrays, names):
    return np.concatenate([arrays[name].ravel() for name in names])


class Reference:
    def __init__(self, job):
        self.job = job
        self.adapter, self.worker = loaded("adapter", job["adapter"]), loaded("worker", job["worker"])
        self.layers = [[each["name"] for each in layer["parameters"]] for layer in job["network"]["layers"]]
        self.layers = [names for names in self.layers if names]

    def trainers(self, count):
        job = self.job
        weights = self.worker.initial_weights(job["network"], job["seed"])
        common = (job["batch"], 1, job["learning_rate"], job["seed"], "cpu", "float32", "eager")
        return [self.adapter.build(job["network"], weights, *common) for _ in range(count)]

    def pools(self, count):
        job = self.job
        shape, classes = job["network"]["input_shape"], job["network"]["classes"]
        return [self.worker.Images(shape, classes, job["batch"], job["seed"] + rank, False) for rank in range(count)]

    def run(self, case):
        pools = self.pools(case["workers"])
        if case["rule"] == "local":
            self.local(case, pools)
            return
        (trainer,) = self.trainers(1)
        kept = [0.0] * case["workers"]
        for step in range(self.job["steps"]):
            found = [trainer.gradients(*pool.read()) for pool in pools]
            if case["rule"] == "dense":
                names = [name for layer in self.layers for name in layer]
                mean = {name: np.mean([each[name].astype(float) for each in found], 0) for name in names}
            else:
                mean, kept = self.sparse(case, found, kept)
            np.savez(Path(self.job["out"]) / f"{case['name']}-{step}.npz", **mean)
            for name, tensor in trainer._weights.items():
                tensor.data -= self.job["learning_rate"] * tensor.data.new_tensor(mean[name])

    def sparse(self, case, found, kept):
        names = [name for layer in reversed(self.layers) for name in layer]
        own = [flat(each, names).astype(float) + rest for each, rest in zip(found, kept, strict=True)]
        size, values = own[0].size, case["chunk_values"]
        starts = range(0, size, values)
        norms = [sum(np.abs(each[start : start + values]).sum() for each in own) for start in starts]
        count = max(1, round((1 - case["sparsity"]) * len(norms)))
        mask = np.zeros(size, bool)
        for chosen in np.argsort(norms)[::-1][:count]:
            mask[chosen * values : (chosen + 1) * values] = True
        mean = np.where(mask, np.mean(own, 0), 0.0)
        shapes = [found[0][name].shape for name in names]
        parts = np.split(mean, np.cumsum([found[0][name].size for name in names])[:-1])
        named = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return named, [np.where(mask, 0.0, each) for each in own]

    def local(self, case, pools):
        trainers = self.trainers(case["workers"])
        for step in range(self.job["steps"]):
            for trainer, pool in zip(trainers, pools, strict=True):
                trainer.step(*pool.read())
            if (step + 1) % case["period"] == 0:
                for name in trainers[0]._weights:
                    tensors = [trainer._weights[name].data for trainer in trainers]
                    mean = sum(tensors) / len(tensors)
                    for tensor in tensors:
                        tensor.copy_(mean)
        arrays = {name: tensor.detach().numpy() for name, tensor in trainers[0]._weights.items()}
        np.savez(Path(self.job["out"]) / f"{case['name']}.npz", **arrays)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    reference = Reference(given)
    for each in given["cases"]:
        reference.run(each)
