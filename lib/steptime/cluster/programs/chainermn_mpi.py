"""One rank of a ChainerMN run under mpirun. Standard library, numpy, mpi4py, Chainer and ChainerMN only.

What ChainerMN's multi-node optimiser does in a step: the gradients' mean by the communicator once backward has ended,
then the update.
"""

import boot

boot.end_with_mpi()

import time  # noqa: E402

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402
import chainermn  # noqa: E402
import numpy as np  # noqa: E402
import ranks  # noqa: E402
import replay  # noqa: E402
from mpi4py import MPI  # noqa: E402


class Computed(object):
    """The adapter's network."""

    def __init__(self, job, worker, communicator):
        self._trainer, self._pool = ranks.network_and_samples(job, worker, communicator.rank)
        self._communicator, self.barrier = communicator, communicator.mpi_comm.Barrier
        communicator.bcast_data(self._trainer._link)
        self.losses, self.parameters = [], self._trainer.parameter_count()

    def step(self):
        stamps, trainer = {"start_s": time.monotonic()}, self._trainer
        images, labels = self._pool.read()
        loss = F.softmax_cross_entropy(trainer._forward(images, True), labels)
        stamps["forward_s"] = time.monotonic()
        trainer._backward(loss)
        stamps["backward_s"] = time.monotonic()
        self._communicator.multi_node_mean_grad(trainer._link)
        stamps["averaged_s"] = time.monotonic()
        trainer._optimizer.update()
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        self.losses.append(float(loss.array))
        return stamps

    def averaged(self):
        gradients = {name: parameter.grad for name, parameter in self._trainer._weights.items()}
        return self._trainer.arrays(gradients)


class Emulated(object):
    """A replayed profile: a parameter a layer, whose gradient is there all along."""

    def __init__(self, job, worker, communicator):
        self._replay = replay.Replay(job["profile"])
        self._communicator, self.barrier = communicator, communicator.mpi_comm.Barrier
        self._link = chainer.Link()
        with self._link.init_scope():
            for number, size in enumerate(self._replay.sizes):
                parameter = chainer.Parameter(np.zeros(size, np.float32))
                parameter.grad = np.ones(size, np.float32)
                setattr(self._link, "layer%04d" % number, parameter)
        self.losses, self.parameters = [], sum(self._replay.sizes)

    def step(self):
        stamps = self._replay.step(lambda number: None)
        self._communicator.multi_node_mean_grad(self._link)
        stamps["averaged_s"] = time.monotonic()
        self._replay.update()
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        return stamps

    def averaged(self):
        return {name: parameter.grad for name, parameter in self._link.namedparams()}


def make(job, worker):
    communicator = chainermn.create_communicator(job["synchronisation"]["communicator"])
    engine = (Computed if job["profile"] is None else Emulated)(job, worker, communicator)
    return communicator.rank, engine


def main():
    ranks.work(ranks.told(), make, chainer.__version__)
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()


if __name__ == "__main__":
    ranks.run(main)
