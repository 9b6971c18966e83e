"""One rank of a CNTK run under mpirun, by its data-parallel learner. Standard library, numpy and CNTK only.

The learner sums the gradients once backward has ended, each value in 32 bits or, keeping what that leaves out for the
next step, in 1 (Seide et al. 2014); then CNTK's own learner updates. `train_minibatch` does all of it in one call.
"""

import boot

boot.end_with_mpi()

import time  # noqa: E402

import cntk as C  # noqa: E402
import numpy as np  # noqa: E402
import ranks  # noqa: E402
import replay  # noqa: E402


def distributed(own, job):
    """The data-parallel learner around CNTK's own."""
    bits = job["synchronisation"]["bits"]
    return C.distributed.data_parallel_distributed_learner(own, num_quantization_bits=bits)


class Computed(object):
    """The adapter's network, trained by the distributed learner in the place of its own.

    Rates are for minibatches of all workers' samples, so that an update is the rate times the mean gradient.
    """

    def __init__(self, job, worker, number):
        self._trainer, self._pool = ranks.network_and_samples(job, worker, number)
        self._samples = job["batch"] * job["workers"]
        parameters, rate = self._trainer._weights, job["learning_rate"]
        if job["save"]:
            self._kept = {name: C.parameter(parameter.shape) for name, parameter in parameters.items()}
            own = C.universal(self._keeping(rate / self._samples), list(parameters.values()))
        else:
            own = C.sgd(list(parameters.values()), C.learning_parameter_schedule(rate, minibatch_size=self._samples))
        learner = distributed(own, job)
        self.barrier = learner.communicator().barrier
        self._trainer._trainer = C.Trainer(self._trainer._outputs, (self._trainer._loss, None), [learner])
        self.losses, self.parameters = [], self._trainer.parameter_count()

    def _keeping(self, rate):
        """The same update by a learner of one's own, which CNTK gives what the distributed one gives it."""
        kept = list(self._kept.values())

        def update(parameters, gradients):
            assigned = [C.assign(place, gradient) for place, gradient in zip(kept, gradients)]
            assigned += [C.assign(p, p - rate * gradient) for p, gradient in zip(parameters, gradients)]
            return C.combine(assigned)

        return update

    def step(self):
        start_s = time.monotonic()
        loss = self._trainer.step(*self._pool.read())
        end_s = time.monotonic()
        self.losses.append(float(loss))
        return {"start_s": start_s, "end_s": end_s}

    def averaged(self):
        described = self._trainer._described
        return {name: described(name, kept.value) / self._samples for name, kept in self._kept.items()}


class Waiting(C.ops.functions.UserFunction):
    """Hands its input on when `before` returns, and the gradient when `wait` does."""

    def __init__(self, x, wait, before=None):
        super(Waiting, self).__init__([x])
        self._wait, self._before = wait, before

    def infer_outputs(self):
        x = self.inputs[0]
        return [C.output_variable(x.shape, x.dtype, x.dynamic_axes)]

    def forward(self, argument, device=None, outputs_to_retain=None):
        if self._before is not None:
            self._before()
        return None, argument

    def backward(self, state, root_gradients):
        self._wait()
        return root_gradients


class Emulated(object):
    """A replayed profile: a chain of functions that wait in backward, each of which then leaves its layer's gradient.

    A weight more at the chain's beginning has CNTK go back to where it began. Calling a function of Python costs CNTK
    some tenths of a millisecond each way: the layers without a gradient have none of their own, and the way forth is
    gone while forward is waited for.
    """

    def __init__(self, job, worker, number):
        self._replay = replay.Replay(job["profile"])
        self._forward_end_s = 0.0
        weights = [C.parameter((size,), init=0) for size in self._replay.sizes]
        first = C.parameter((1,), init=0)
        self._input = C.input_variable((1,))
        x = C.user_function(Waiting(self._input + first, self._waiting_until(self._replay.ends_s[-1][0])))
        ready = [(passed_s, number) for passed_s, number in self._replay.ends_s if number is not None]
        for place, (passed_s, number) in reversed(list(enumerate(ready))):
            before = None if place else self._waiting_until(0.0)
            x = C.user_function(Waiting(x + C.reduce_sum(weights[number]), self._waiting_until(passed_s), before))
        loss = C.reduce_sum(x)
        own = C.sgd([first, *weights], C.learning_parameter_schedule(0.0, minibatch_size=1))
        learner = distributed(own, job)
        self.barrier = learner.communicator().barrier
        self._trainer = C.Trainer(x, (loss, None), [learner])
        self._sample = {self._input: C.Value(batch=np.ones((1, 1), np.float32))}
        self.losses, self.parameters = [], sum(self._replay.sizes)

    def _waiting_until(self, passed_s):
        return lambda: replay.wait_until(self._forward_end_s + passed_s)

    def step(self):
        start_s = time.monotonic()
        self._forward_end_s = start_s + self._replay.before_s
        self._trainer.train_minibatch(self._sample)
        self._replay.update()
        backward_s = self._forward_end_s + self._replay.ends_s[-1][0]
        stamps = {"start_s": start_s, "forward_s": self._forward_end_s, "backward_s": backward_s}
        return dict(stamps, end_s=time.monotonic())

    def averaged(self):
        return {}


def make(job, worker):
    number = C.distributed.Communicator.rank()
    return number, (Computed if job["profile"] is None else Emulated)(job, worker, number)


def main():
    ranks.work(ranks.told(), make, C.__version__)
    C.distributed.Communicator.finalize()


if __name__ == "__main__":
    ranks.run(main)
