"""One process of an MXNet run by its KVStore: what DMLC_ROLE says. Standard library, numpy and MXNet only.

A scheduler and a server serve inside the import of MXNet and end there, once the workers have. A worker does what
`Module.fit` does for a dist_sync store: a key a tensor, pushed and pulled with the first layers' keys most urgent, all
handed to MXNet's engine at once, which sends each as soon as its gradient exists. Weights are updated by the workers
(MXNET_UPDATE_ON_KVSTORE = 0), so that what comes back is the sum of the gradients.
"""

import time

import mxnet as mx
import ranks
import replay


class Computed(object):
    """The adapter's network, its gradients summed by the store."""

    def __init__(self, job, worker):
        self._store = mx.kv.create(job["synchronisation"]["store"])
        self.number, self._workers = self._store.rank, self._store.num_workers
        self._trainer, self._pool = ranks.network_and_samples(job, worker, self.number)
        self._gradients = list(self._trainer._gradients.values())
        self._trainer._updater.optimizer.rescale_grad = 1.0 / self._workers
        for key, gradient in enumerate(self._gradients):
            self._store.init(key, mx.nd.zeros(gradient.shape))
        self.losses, self.parameters = [], self._trainer.parameter_count()
        self.barrier = self._store._barrier

    def step(self):
        stamps, executor = {"start_s": time.monotonic()}, self._trainer._executor
        images, labels = self._pool.read()
        self._trainer._load(images, labels)
        executor.forward(is_train=True)
        executor.outputs[0].wait_to_read()
        stamps["forward_s"] = time.monotonic()
        executor.backward()
        # A pull writes over the gradient: of the one that comes last a value is kept, to know when it was there.
        last = self._gradients[0].reshape((-1,))[0:1].copy()
        for key, gradient in enumerate(self._gradients):
            self._store.push(key, gradient, priority=-key)
            self._store.pull(key, out=gradient, priority=-key)
        last.wait_to_read()
        stamps["backward_s"] = time.monotonic()
        mx.nd.waitall()
        stamps["averaged_s"] = time.monotonic()
        self._trainer._update()
        mx.nd.waitall()
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        chances = executor.outputs[0].asnumpy()[range(len(labels)), labels]
        self.losses.append(float(-ranks.np.log(ranks.np.maximum(chances, 1e-30)).mean()))
        return stamps

    def averaged(self):
        sums = self._trainer.arrays(self._trainer._gradients)
        return {name: values / self._workers for name, values in sums.items()}


class Emulated(object):
    """A replayed profile: a key a layer, handed to the engine at the layer's moment."""

    def __init__(self, job, worker):
        self._store = mx.kv.create(job["synchronisation"]["store"])
        self.number = self._store.rank
        self._replay = replay.Replay(job["profile"])
        self._gradients = [mx.nd.zeros((size,)) for size in self._replay.sizes]
        for key, gradient in enumerate(self._gradients):
            self._store.init(key, mx.nd.zeros(gradient.shape))
        self.losses, self.parameters = [], sum(self._replay.sizes)
        self.barrier = self._store._barrier

    def step(self):
        stamps = self._replay.step(self._send)
        mx.nd.waitall()
        stamps["averaged_s"] = time.monotonic()
        self._replay.update()
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        return stamps

    def _send(self, key):
        self._store.push(key, self._gradients[key], priority=-key)
        self._store.pull(key, out=self._gradients[key], priority=-key)

    def averaged(self):
        return {"%d" % key: gradient.asnumpy() for key, gradient in enumerate(self._gradients)}


def make(job, worker):
    engine = (Computed if job["profile"] is None else Emulated)(job, worker)
    return engine.number, engine


def main():
    ranks.work(ranks.told(), make, mx.__version__)


if __name__ == "__main__":
    # The store, as it is taken down, tells its servers and scheduler that this worker is done.
    ranks.run(main, at_once=False)
