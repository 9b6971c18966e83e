"""Where a rank's gradients come from: a network that really computes, or a layer profile replayed (replay.py).

Both have `layers`, the learnable ones in forward order, each with the tensors that are its gradient after a step's
backward pass; `step(ready)`, which calls `ready(l)` as soon as layer l's gradient exists and returns time stamps; and
`update()`. Seconds of time.monotonic, which all ranks of a machine share.
"""

import time

import replay
import torch
from torch import nn


class Layer(object):
    """A learnable layer: its name, the tensors that are trained, and for a dense one (out, in) features or None."""

    def __init__(self, name, tensors, dense=None):
        self.name, self.tensors, self.dense = name, tensors, dense
        self.given = self.taken = None

    @property
    def gradients(self):
        return [tensor.grad for tensor in self.tensors]

    def factors(self):
        """A dense layer's gradient as (gradient of its output, its input), a row a sample."""
        return self.given, self.taken

    def rebuild(self, given, taken, share):
        """The gradient that the factors of all samples make, times `share`."""
        weight, *bias = self.gradients
        torch.matmul(given.t(), taken, out=weight).mul_(share)
        for tensor in bias:
            torch.sum(given, 0, out=tensor).mul_(share)


class Stamps(object):
    """When a step began, when forward ended, and when the last gradient existed."""

    def __init__(self):
        self.start_s = self.forward_s = self.backward_s = time.monotonic()


class Computed(object):
    """The torch adapter's network, layer by layer, with a hook on every weight's gradient."""

    def __init__(self, adapter, worker, job, rank):
        network, batch, seed = job["network"], job["batch"], job["seed"]
        weights = worker.initial_weights(network, seed)
        self._trainer = adapter.build(
            network, weights, batch, job["threads"], job["learning_rate"], seed, "cpu", "float32", "eager"
        )
        pool_of = {"shape": network["input_shape"], "classes": network["classes"], "batch": batch, "seed": seed + rank}
        if network["vocabulary"]:
            self._pool = worker.Tokens(vocabulary=network["vocabulary"], **pool_of)
        else:
            self._pool = worker.Images(channels_last=False, **pool_of)
        self.losses = []
        self._make_parameters()
        dense = {
            layer["name"]: tuple(layer["parameters"][0]["shape"])
            for layer in network["layers"]
            if layer["kind"] == "dense"
        }
        self.layers = [
            Layer(name, tensors, dense.get(name)) for name, _, tensors, _ in self._trainer._layers if tensors
        ]
        self._ready = None
        self._pending = {}
        for number, layer in enumerate(self.layers):
            for tensor in layer.tensors:
                tensor.register_post_accumulate_grad_hook(lambda _, number=number: self._accumulated(number))

    def _make_parameters(self):
        """Parameters in the place of the trainer's tensors: DistributedDataParallel knows only those."""
        trainer = self._trainer
        trainer._weights = {name: nn.Parameter(tensor.detach()) for name, tensor in trainer._weights.items()}
        places = iter(trainer._weights.values())
        trainer._layers = [
            (name, inputs, [next(places) for _ in tensors], run) for name, inputs, tensors, run in trainer._layers
        ]

    def keep_factors(self, chosen):
        """From now on the layers numbered `chosen` keep their input and their output's gradient."""
        kept = {self.layers[number].name: self.layers[number] for number in chosen}

        def keeping(layer, run):
            def kept_run(x, w, training):
                output = run(x, w, training)
                layer.taken = x[0].detach()
                output.register_hook(lambda gradient: setattr(layer, "given", gradient))
                return output

            return kept_run

        self._trainer._layers = [
            (name, inputs, tensors, keeping(kept[name], run) if name in kept else run)
            for name, inputs, tensors, run in self._trainer._layers
        ]

    def module(self):
        """The network as a module that maps (images, labels) to the loss."""
        trainer = self._trainer

        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.ParameterList(trainer._weights.values())

            def forward(self, images, labels):
                return trainer._loss(*trainer._to_device(images, labels))

        return Module()

    def step(self, ready, module=None):
        """`module`: what computes the loss in place of the network itself."""
        self._ready = ready
        self._pending = {number: len(layer.tensors) for number, layer in enumerate(self.layers)}
        self._stamps = Stamps()
        batch = self._pool.read()
        loss = module(*batch) if module else self._trainer._loss(*self._trainer._to_device(*batch))
        self._stamps.forward_s = time.monotonic()
        loss.backward()
        self.losses.append(loss.item())
        return self._stamps

    def _accumulated(self, number):
        self._pending[number] -= 1
        if self._pending[number] == 0:
            self._stamps.backward_s = time.monotonic()
            self._ready(number)

    def update(self):
        self._trainer._update()

    def weights(self):
        return dict(self._trainer._weights)

    def gradients(self):
        return {name: tensor.grad.numpy() for name, tensor in self._trainer._weights.items()}


class Emulated(replay.Replay):
    """A layer profile in place of a network: passes that wait, gradients of the right size."""

    def __init__(self, profile, batch):
        super().__init__(profile)
        self.losses = []
        self.layers = [self._layer(layer, batch) for layer in profile["layers"] if layer["parameter_bytes"]]

    @staticmethod
    def _layer(described, batch):
        """Gradients of ones; they stay ones when averaged. A dense layer's factors are there, but never rebuilt."""
        tensor = nn.Parameter(torch.zeros(int(described["parameter_bytes"]) // 4))
        tensor.grad = torch.ones_like(tensor)
        dense = described.get("dense")
        layer = Layer(described["layer"], [tensor], None if dense is None else tuple(dense))
        if layer.dense is not None:
            layer.given, layer.taken = (torch.ones(batch, features) for features in layer.dense)
        layer.rebuild = lambda given, taken, share: None
        return layer

    def keep_factors(self, chosen):
        """They are there."""

    def module(self):
        """A chain of operations that wait in backward, for engines that find gradients by autograd."""
        profile = self

        class Waiting(torch.autograd.Function):
            @staticmethod
            def forward(context, x, number, *weights):
                context.number = number
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                passed_s, learnable = profile.ends_s[context.number]
                replay.wait_until(profile._stamps.forward_s + passed_s)
                profile._stamps.backward_s = time.monotonic()
                given = [] if learnable is None else [torch.ones_like(profile.layers[learnable].tensors[0])]
                return (gradient, None, *given)

        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.ParameterList(layer.tensors[0] for layer in profile.layers)

            def forward(self, x):
                for number in reversed(range(len(profile.ends_s))):
                    learnable = profile.ends_s[number][1]
                    x = Waiting.apply(x, number, *([] if learnable is None else [self.weights[learnable]]))
                return x.sum()

        return Module()

    def step(self, ready, module=None):
        self._stamps = stamps = Stamps()
        if module is None:
            vars(stamps).update(super().step(ready))
            return stamps
        loss = module(torch.zeros(1, requires_grad=True))
        stamps.forward_s = stamps.start_s + self.before_s
        replay.wait_until(stamps.forward_s)
        for layer in self.layers:
            layer.tensors[0].grad = None
        loss.backward()
        return stamps

    def weights(self):
        return {layer.name: layer.tensors[0] for layer in self.layers}

    def gradients(self):
        return {layer.name: layer.tensors[0].grad.numpy() for layer in self.layers}
