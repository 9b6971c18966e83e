"""One rank of Caffe with MPI under mpirun: what Caffe-MPI does. Standard library, numpy and Caffe only; MPI by its C
library, which no package of this environment wraps.

Backward is run layer by layer; each learnable layer's gradients are handed to a thread, which all-reduces them layer
after layer while backward goes on (wait_free), or they are all-reduced as one message once backward has ended
(end_of_backward). Caffe's layers keep Python's lock while they run, so that a message begins between two layers.
"""

import boot

boot.end_with_mpi()

import ctypes  # noqa: E402
import queue  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

import caffe  # noqa: E402
import numpy as np  # noqa: E402
import ranks  # noqa: E402
import replay  # noqa: E402

MPI_THREAD_MULTIPLE = 3


class OpenMPI(object):
    """The few functions of OpenMPI's C library that are needed; ctypes leaves Python's lock during a call."""

    def __init__(self):
        self._library = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        self._world, self._float, self._sum = (
            ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, name)))
            for name in ("ompi_mpi_comm_world", "ompi_mpi_float", "ompi_mpi_op_sum")
        )
        level = ctypes.c_int()
        self._called("MPI_Init_thread", None, None, MPI_THREAD_MULTIPLE, ctypes.byref(level))
        self.rank, self.size = self._number("MPI_Comm_rank"), self._number("MPI_Comm_size")

    def sum(self, values):
        """Replace a contiguous float32 array by its sum over the ranks."""
        place = ctypes.c_void_p(values.ctypes.data)
        in_place = ctypes.c_void_p(1)
        self._called("MPI_Allreduce", in_place, place, values.size, self._float, self._sum, self._world)

    def barrier(self):
        self._called("MPI_Barrier", self._world)

    def finalize(self):
        self._called("MPI_Finalize")

    def _number(self, function):
        number = ctypes.c_int()
        self._called(function, self._world, ctypes.byref(number))
        return number.value

    def _called(self, function, *arguments):
        code = getattr(self._library, function)(*arguments)
        if code:
            raise RuntimeError("%s: error %d" % (function, code))


class Exchange(object):
    """Layers' gradients, each a list of arrays, summed over the ranks in the order of backward."""

    def __init__(self, mpi, gradients, at_once):
        self._mpi, self._gradients, self._at_once = mpi, gradients, at_once
        self._ready, self._done = queue.Queue(), queue.Queue()
        if at_once:
            thread = threading.Thread(target=self._serve)
            thread.daemon = True
            thread.start()
        else:
            self._message = np.empty(sum(each.size for layer in gradients for each in layer), np.float32)

    def ready(self, number):
        if self._at_once:
            self._ready.put(number)

    def finish(self):
        """Return when all are summed."""
        if self._at_once:
            for _ in self._gradients:
                error = self._done.get()
                if error is not None:
                    raise error
            return
        flat = [each.reshape(-1) for layer in self._gradients for each in layer]
        np.concatenate(flat, out=self._message)
        self._mpi.sum(self._message)
        start = 0
        for each in flat:
            each[:] = self._message[start : start + each.size]
            start += each.size

    def _serve(self):
        while True:
            try:
                for gradient in self._gradients[self._ready.get()]:
                    self._mpi.sum(gradient)
                self._done.put(None)
            except Exception as error:
                self._done.put(error)


class Computed(object):
    """The adapter's network. Caffe's solver updates only in a step of its own, so the update here is numpy's."""

    def __init__(self, job, worker, mpi):
        self._trainer, self._pool = ranks.network_and_samples(job, worker, mpi.rank)
        self._mpi, self.barrier, self._net = mpi, mpi.barrier, self._trainer._net
        self._rate, self._loss = job["learning_rate"], self._net.outputs[-1]
        learnable = [layer for layer in job["network"]["layers"] if layer["parameters"]]
        names = [layer["name"] + ("/scale" if layer["kind"] == "batch_norm" else "") for layer in learnable]
        places = {name: place for place, name in enumerate(self._net._layer_names)}
        self._blobs = {places[name]: list(self._net.params[name]) for name in names}
        self._numbers = {place: number for number, place in enumerate(self._blobs)}
        gradients = [[blob.diff for blob in blobs] for blobs in self._blobs.values()]
        self._exchange = Exchange(mpi, gradients, job["synchronisation"]["at_once"])
        self.losses, self.parameters = [], self._trainer.parameter_count()

    def step(self):
        stamps, net, last = {"start_s": time.monotonic()}, self._net, len(self._net.layers) - 1
        self._trainer._copy(net, *self._pool.read())
        net.clear_param_diffs()
        net._forward(0, last)
        stamps["forward_s"] = time.monotonic()
        for place in reversed(range(last + 1)):
            net._backward(place, place)
            if place in self._numbers:
                self._exchange.ready(self._numbers[place])
        stamps["backward_s"] = time.monotonic()
        self._exchange.finish()
        stamps["averaged_s"] = time.monotonic()
        for blobs in self._blobs.values():
            for blob in blobs:
                blob.data[...] -= (self._rate / self._mpi.size) * blob.diff
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        self.losses.append(float(net.blobs[self._loss].data))
        return stamps

    def averaged(self):
        parameters = self._trainer._parameters(self._net)
        return self._trainer.arrays({name: blob.diff / self._mpi.size for name, blob in parameters})


class Emulated(object):
    """A replayed profile: an array a layer."""

    def __init__(self, job, worker, mpi):
        self._replay = replay.Replay(job["profile"])
        self._gradients = [np.zeros(size, np.float32) for size in self._replay.sizes]
        self._exchange = Exchange(mpi, [[each] for each in self._gradients], job["synchronisation"]["at_once"])
        self.barrier, self.losses, self.parameters = mpi.barrier, [], sum(self._replay.sizes)

    def step(self):
        stamps = self._replay.step(self._exchange.ready)
        self._exchange.finish()
        stamps["averaged_s"] = time.monotonic()
        self._replay.update()
        stamps["updated_s"] = stamps["end_s"] = time.monotonic()
        return stamps

    def averaged(self):
        return {"%d" % number: gradient for number, gradient in enumerate(self._gradients)}


def main():
    # The thread that communicates must not wait 5 ms for the one that computes.
    sys.setswitchinterval(1e-4)
    mpi = OpenMPI()

    def make(job, worker):
        return mpi.rank, (Computed if job["profile"] is None else Emulated)(job, worker, mpi)

    ranks.work(ranks.told(), make, caffe.__version__)
    mpi.barrier()
    mpi.finalize()


if __name__ == "__main__":
    ranks.run(main)
