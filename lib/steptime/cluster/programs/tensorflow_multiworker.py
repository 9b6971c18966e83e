"""One worker of TensorFlow's MultiWorkerMirroredStrategy, which finds the others in TF_CONFIG. Standard library, numpy
and TensorFlow 2 only.

The whole step is one graph in which the strategy's ring all-reduce joins gradients into packs of `pack_bytes` (0: all
in one); when which part of it runs is TensorFlow's affair. A profile is replayed by operations that wait, one a layer,
in the order of a backward pass.
"""

import json
import os
import sys
import time

import ranks
import replay

sys.modules["keras"] = None  # as in the adapter: it is not used here
import tensorflow as tf  # noqa: E402

LINGERS_S, LEADER_LINGERS_S = 2.0, 3.0
"""A worker that has all it needs may still hold what another has to fetch; the first keeps the books of who is there:
it goes last."""


class Engine(object):
    """What both have: the strategy and its all-reduce."""

    def __init__(self, job, at_once):
        """`at_once`: how many operations of the graph."""
        tf.config.threading.set_intra_op_parallelism_threads(job["threads"])
        tf.config.threading.set_inter_op_parallelism_threads(at_once)
        communication = tf.distribute.experimental
        self._options = communication.CommunicationOptions(
            bytes_per_pack=job["synchronisation"]["pack_bytes"],
            implementation=communication.CollectiveCommunication.RING,
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=self._options)
        self.losses = []
        self._joined = self._function(lambda one: self._mean([tf.identity(one)]))
        self._averages = []

    def barrier(self):
        self._joined(tf.constant(1.0))[0].numpy()

    def _mean(self, gradients):
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients, self._options)

    def _function(self, replica):
        return tf.function(lambda *inputs: self._strategy.run(replica, args=inputs), autograph=False)


class Computed(Engine):
    """The adapter's network."""

    def __init__(self, job, worker, number):
        super(Computed, self).__init__(job, 1)
        with self._strategy.scope():
            self._trainer, self._pool = ranks.network_and_samples(job, worker, number)
        self.parameters = self._trainer.parameter_count()
        self._step = self._function(self._replica)

    def _replica(self, images, labels):
        loss, gradients = self._trainer._loss_and_gradients(images, labels)
        averages = self._mean([tf.convert_to_tensor(gradient) for gradient in gradients])
        self._trainer._update(averages)
        return loss, averages

    def step(self):
        start_s = time.monotonic()
        images, labels = self._pool.read()
        loss, self._averages = self._step(tf.convert_to_tensor(images), tf.convert_to_tensor(labels))
        self.losses.append(float(loss))
        return {"start_s": start_s, "end_s": time.monotonic()}

    def averaged(self):
        return self._trainer.arrays(dict(zip(self._trainer._weights, self._averages, strict=True)))


class Emulated(Engine):
    """A replayed profile."""

    def __init__(self, job, worker, number):
        super(Emulated, self).__init__(job, 2)  # one waits in the place of a device
        self._replay = replay.Replay(job["profile"])
        self.parameters = sum(self._replay.sizes)
        self._forward_end_s = 0.0
        self._step = self._function(self._replica)

    def _replica(self, begun):
        gradients = [None] * len(self._replay.sizes)
        order = begun
        for passed_s, number in self._replay.ends_s:
            order = tf.numpy_function(self._waiting_until(passed_s), [order], tf.float32)
            if number is not None:
                with tf.control_dependencies([order]):
                    gradients[number] = tf.ones((self._replay.sizes[number],))
        return self._mean(gradients)

    def _waiting_until(self, passed_s):
        def waited(given):
            replay.wait_until(self._forward_end_s + passed_s)
            return given

        return waited

    def step(self):
        start_s = time.monotonic()
        self._forward_end_s = start_s + self._replay.before_s
        replay.wait_until(self._forward_end_s)
        self._averages = self._step(tf.constant(1.0))
        self._averages[0].numpy()
        averaged_s = time.monotonic()
        self._replay.update()
        end_s = time.monotonic()
        backward_s = self._forward_end_s + self._replay.ends_s[-1][0]
        stamps = {"forward_s": self._forward_end_s, "backward_s": backward_s, "averaged_s": averaged_s}
        return dict(stamps, start_s=start_s, updated_s=end_s, end_s=end_s)

    def averaged(self):
        return {"%d" % number: average.numpy() for number, average in enumerate(self._averages)}


def make(job, worker):
    number = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return number, (Computed if job["profile"] is None else Emulated)(job, worker, number)


def main():
    ranks.work(ranks.told(), make, tf.__version__)
    is_leader = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
    time.sleep(LEADER_LINGERS_S if is_leader else LINGERS_S)


if __name__ == "__main__":
    ranks.run(main)
