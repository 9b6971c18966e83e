"""A torch module as its author wrote it, measured from outside. See adapters/__init__.py.

The network is not described to this adapter but found by it: `network["module"]` says where the function that makes
the module is, and what its inputs look like; `describe` answers with the layers. A layer is a module that is called:
its time is its own, without the modules that it calls, so that a skip connection's addition is its block's. What the
module is trained for is unknown here, so the loss is the mean square of its outputs; the optimiser is plain SGD, and
modules are in training mode. Parity with other frameworks (`gradients`, `flops`) does not apply.
"""

import importlib
import importlib.util
import os
import sys
import time

import numpy as np
import torch

# The worker's folder is where Python looks first; a module is timed as torch's other settings are.
from adapters.pytorch import configure, seconds_of_a_hook, told, versions  # noqa: F401

CHANNELS_LAST = False
POOL_BATCHES = 4
ROOT = "(whole)"
"""The name of the module itself, whose own layer is what it computes between the modules that it calls."""


def own_samples(network, batch, seed):
    return Inputs(network["module"]["inputs"], batch, seed)


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    configure(threads, seed)
    module = made(network["module"]["folder"], network["module"]["target"])
    return Trainer(module, learning_rate, torch.device(device), dtype)


def made(folder, target):
    """The module that "my_module:make_model" or "path/my_module.py:make_model" makes, seen from `folder`."""
    source, _, name = target.rpartition(":")
    sys.path.insert(0, folder)
    if source.endswith(".py"):
        path = os.path.join(folder, source)
        if not os.path.isfile(path):
            raise ValueError("%s: there is no such file" % source)
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location(os.path.basename(source)[:-3], path)
        holder = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = holder
        spec.loader.exec_module(holder)
    else:
        holder = importlib.import_module(source)
    if not callable(getattr(holder, name, None)):
        raise ValueError("%s has no function %r" % (source, name))
    module = getattr(holder, name)()
    if not isinstance(module, torch.nn.Module):
        raise ValueError("%s() makes a %s, not a torch.nn.Module" % (name, type(module).__name__))
    return module


class Inputs(object):
    """A fixed pool of random inputs: normal numbers, or whole numbers below what is said; read in shuffled order."""

    def __init__(self, inputs, batch, seed):
        self._random = np.random.RandomState(seed)
        self._batch, self._count = batch, POOL_BATCHES * batch
        self._order = np.arange(0)
        self._arrays = [self._drawn(tuple(one["shape"]), one["below"]) for one in inputs]

    def read(self):
        if len(self._order) < self._batch:
            self._order = self._random.permutation(self._count)
        chosen, self._order = self._order[: self._batch], self._order[self._batch :]
        return [array[chosen] for array in self._arrays], None

    def first(self):
        return [array[: self._batch].copy() for array in self._arrays], None

    def settle(self):
        """Nothing is read ahead."""

    def close(self):
        """Nothing to end."""

    def _drawn(self, shape, below):
        shape = (self._count, *shape)
        if below:
            return self._random.randint(0, below, size=shape).astype(np.int64)
        return self._random.standard_normal(size=shape).astype(np.float32)


def tensors_of(value):
    """Every tensor in what a module was given or returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_of(one)]
    return []


def mean_square(outputs):
    """The loss: the sum over outputs of the mean of their squares."""
    floating = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
    if not floating:
        raise NotImplementedError("its output holds no tensor of floating-point numbers: nothing to train")
    loss = sum(tensor.float().square().mean() for tensor in floating)
    if not loss.requires_grad:
        raise NotImplementedError("its output depends on no trainable parameter: nothing to train")
    return loss


class Trainer(object):
    _hook_s = None

    def __init__(self, module, learning_rate, device, dtype):
        self._module = module.to(device).train()
        self._device = device
        self._cuda = device.type == "cuda"
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
        self._learning_rate = learning_rate
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise NotImplementedError("it has no trainable parameter: nothing to train")
        if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in self._parameters.values()):
            raise NotImplementedError(
                "it has lazy modules, whose shapes are not known yet; call it once in its function"
            )
        self._names = {one: name or ROOT for name, one in module.named_modules()}

    def step(self, images, labels):
        loss = self._loss(self._to_device(images))
        loss.backward()
        self._update()
        self._wait()
        return loss.item()

    def phases(self, images, labels):
        times = [self._now()]
        x = self._to_device(images)
        times.append(self._now())
        loss = self._loss(x)
        times.append(self._now())
        loss.backward()
        times.append(self._now())
        self._update()
        times.append(self._now())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

    def profiled_step(self, images, labels):
        """A whole step with a time stamp wherever a module is entered or left, and in a hook on each tensor that passes

        between modules, which autograd calls when it turns to what made that tensor. What lies between two stamps
        belongs to what began at the first.
        """
        if self._hook_s is None:
            self._hook_s = seconds_of_a_hook(self._now, self._device)
        stamps, stack = [], []

        def began(part):
            stamps.append((part, self._now()))

        def watch(value, owner):
            for tensor in tensors_of(value):
                # An operation in place gives the same tensor another history, and that is another layer's.
                if tensor.grad_fn is not None and getattr(tensor, "_watched", None) is not tensor.grad_fn:
                    tensor._watched = tensor.grad_fn
                    tensor.register_hook(lambda gradient: began(("backward_s", owner)))

        def enter(module, args, kwargs):
            began("instruments")
            if stack:
                watch([args, kwargs], stack[-1])
            stack.append(self._names[module])
            began(("forward_s", stack[-1]))

        def leave(module, args, kwargs, output):
            began("instruments")
            watch(output, stack.pop())
            began(("forward_s", stack[-1]) if stack else "loss")

        handles = self._hooks(enter, leave)
        try:
            began("h2d")
            x = self._to_device(images)
            began("dispatch")
            loss = self._loss(x)
            entered = len(stamps)
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        began("update")
        self._update()
        self._wait()
        loss.item()
        began("end")
        if any(isinstance(part, tuple) and part[0] == "forward_s" for part, _ in stamps[entered:]):
            raise NotImplementedError("it calls modules again in backward (checkpointing): their times cannot be told")
        return told(stamps, self._hook_s)

    def describe(self, images):
        """The layers in the order in which they are first called, each with the parameters whose gradients are complete

        when backward has passed it, and what is special: {layers, unused, tied, frozen}.
        """
        calls = self._calls(images)
        owners = self._owners(list(calls))
        self._loss(self._to_device(images)).backward()
        unused = [name for name, p in self._parameters.items() if p.grad is None]
        for p in self._parameters.values():
            p.grad = None
        layers = []
        for name, (kind, shape) in calls.items():
            own = [
                {"name": parameter, "shape": list(self._parameters[parameter].shape)}
                for parameter, users in owners.items()
                if users and users[0] == name and parameter not in unused
            ]
            layers.append({"name": name, "kind": kind, "out_shape": shape, "parameters": own})
        tied = [[name, *users] for name, users in owners.items() if len(users) > 1 and name not in unused]
        frozen = sum(p.numel() for p in self._module.parameters() if not p.requires_grad)
        return {"layers": layers, "unused": unused, "tied": tied, "frozen": frozen}

    def shapes(self, images):
        return {name: shape for name, (_, shape) in self._calls(images).items()}

    def parameter_count(self):
        return sum(p.numel() for p in self._parameters.values())

    def device_peak_bytes(self):
        return torch.cuda.max_memory_allocated(self._device) if self._cuda else None

    def _calls(self, images):
        """{layer: (class, shape of its output without the batch)} of every module that is called, in that order."""
        calls = {}

        def enter(module, args, kwargs):
            calls.setdefault(self._names[module], (type(module).__name__, []))

        def leave(module, args, kwargs, output):
            tensors = tensors_of(output)
            if tensors:
                calls[self._names[module]] = (type(module).__name__, list(tensors[0].shape[1:]))

        handles = self._hooks(enter, leave)
        try:
            with torch.no_grad(), self._autocast:
                self._module(*self._to_device(images))
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _owners(self, called):
        """{parameter: the layers that use it}, in the order of their calls. Of a module that is never called itself, it

        is the nearest one around it that is: attention reads its projection's weights without calling it.
        """
        users = {id(p): [] for p in self._parameters.values()}
        for name, module in self._module.named_modules():
            while name and name not in called:
                name = name.rpartition(".")[0]
            for p in module._parameters.values():
                if p is not None and id(p) in users and (name or ROOT) not in users[id(p)]:
                    users[id(p)].append(name or ROOT)
        return {name: sorted(users[id(p)], key=called.index) for name, p in self._parameters.items()}

    def _hooks(self, enter, leave):
        handles = []
        for module in self._names:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        return handles

    def _loss(self, x):
        with self._autocast:
            return mean_square(self._module(*x))

    def _update(self):
        with torch.no_grad():
            for p in self._parameters.values():
                # A parameter that nothing used has no gradient.
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self._learning_rate)
                    p.grad = None

    def _to_device(self, images):
        return [torch.from_numpy(array).to(self._device) for array in images]

    def _wait(self):
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _now(self):
        self._wait()
        return time.perf_counter()
