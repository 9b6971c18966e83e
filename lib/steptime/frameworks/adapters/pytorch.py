"""PyTorch. See adapters/__init__.py.

Mode "eager": one call of torch.nn.functional a layer, gradients by autograd. "channels_last": the same with images and
convolutions' weights in that memory format. "compile": forward by torch.compile, backward by its autograd, loss and
update as in the other modes; layers are fused, so none can be timed. bfloat16: torch.autocast of forward and loss.
"""

import os
import re
import shutil
import time

import torch
import torch.nn.functional as F

CHANNELS_LAST = False
HOOK_CHAIN, HOOK_CHAINS = 100, 15


def versions():
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {"framework": torch.__version__, "blas": blas.group(1) if blas else "unknown"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    configure(threads, seed)
    if mode == "compile":
        check_compiler()
    trainer = Trainer if mode == "compile" else LayeredTrainer
    return trainer(network, weights, batch, learning_rate, torch.device(device), dtype, mode)


def configure(threads, seed):
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    # float32 means float32, and each framework may pick its convolution algorithms by trial.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


def told(stamps, hook_s, names=()):
    """What profiled_step answers, from its stamps (part, moment): what lies between two belongs to the first's part.

    `hook_s`: what each stretch of backward holds of the hook that began it. `names`: layers in their order; others
    follow in the order of their stamps.
    """
    parts = {"h2d": 0.0, "loss": 0.0, "update": 0.0, "dispatch": 0.0, "instruments": 0.0}
    layers = {name: {"layer": name, "forward_s": 0.0, "backward_s": 0.0} for name in names}
    for (part, start), (_, end) in zip(stamps, stamps[1:]):
        if isinstance(part, tuple):
            phase, name = part
            layer = layers.setdefault(name, {"layer": name, "forward_s": 0.0, "backward_s": 0.0})
            layer[phase] += max(0.0, end - start - (hook_s if phase == "backward_s" else 0.0))
        else:
            parts[part] += end - start
    # A plain step has none of these.
    del parts["instruments"]
    return {"layers": list(layers.values()), "parts": parts}


def seconds_of_a_hook(now, device):
    """What a hook with a time stamp of `now` adds to a layer's backward: a chain of views that do nothing tells."""
    stamps = []

    def hook(gradient):
        stamps.append((("backward_s", None), now()))

    differences = [chain_s(now, device, hook) - chain_s(now, device, None) for _ in range(HOOK_CHAINS)]
    return max(0.0, sorted(differences)[HOOK_CHAINS // 2] / HOOK_CHAIN)


def chain_s(now, device, hook):
    x = torch.zeros(1, device=device, requires_grad=True)
    for _ in range(HOOK_CHAIN):
        x = x.view(1)
        if hook is not None:
            x.register_hook(hook)
    start = now()
    x.backward()
    return now() - start


def check_compiler():
    """Inductor writes C++; without a compiler it fails in the middle of the first step, at length."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError("torch.compile needs a C++ compiler: %s is not found; install g++ or set CXX" % compiler)
    if " " in torch.__file__:
        raise NotImplementedError("torch.compile: inductor links nothing from an environment whose path has a space")


def pad_both(pad):
    """(padding for the operation itself, padding to add before it): operations know only equal edges."""
    top, bottom, left, right = pad
    if top == bottom and left == right:
        return (top, left), None
    return (0, 0), (left, right, top, bottom)


def ceil_mode_fits(layer):
    """Whether rounding up gives the described max pooling, so that no padded copy is needed."""
    settings = layer["settings"]
    top, _, left, _ = settings["pad"]
    for begin, kernel, stride, length, wanted in zip(
        (top, left), settings["kernel"], settings["stride"], layer["in_shapes"][0][1:], layer["out_shape"][1:]
    ):
        windows = -(-(length + 2 * begin - kernel) // stride) + 1
        if (windows - 1) * stride >= length + begin:
            windows -= 1
        if windows != wanted or 2 * begin > kernel:
            return False
    return True


def lstm(x, w, training):
    """torch's own fused LSTM, which is what torch.nn.LSTM calls. Its gates are in our order; its second bias is 0."""
    input_weight, hidden_weight, bias = w
    state = x[0].new_zeros(1, x[0].shape[0], hidden_weight.shape[1])
    weights = [input_weight, hidden_weight, bias, torch.zeros_like(bias)]
    return torch._VF.lstm(x[0], (state, state), weights, True, 1, 0.0, training, False, True)[0]


def attention(x, w, heads):
    batch, steps, features = x.shape
    qkv = F.linear(x, w[0], w[1]).view(batch, steps, 3, heads, features // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return F.linear(mixed.transpose(1, 2).reshape(batch, steps, features), w[2], w[3])


def operation(layer):
    """The function (inputs, weights, training) -> output of one layer."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        pad, before = pad_both(s["pad"])

        def convolution(x, w, training):
            x = x[0] if before is None else F.pad(x[0], before)
            return F.conv2d(x, w[0], w[1] if s["bias"] else None, s["stride"], pad, 1, s["groups"])

        return convolution
    if kind in ("dense", "token_dense"):
        return lambda x, w, training: F.linear(x[0], w[0], w[1] if s["bias"] else None)
    if kind == "relu":
        return lambda x, w, training: F.relu(x[0])
    if kind == "max_pool":
        if ceil_mode_fits(layer):
            begin = (s["pad"][0], s["pad"][2])
            return lambda x, w, training: F.max_pool2d(x[0], s["kernel"], s["stride"], begin, ceil_mode=True)
        top, bottom, left, right = s["pad"]
        edges = (left, right, top, bottom)
        return lambda x, w, training: F.max_pool2d(F.pad(x[0], edges, value=-float("inf")), s["kernel"], s["stride"])
    if kind == "avg_pool":
        pad, before = pad_both(s["pad"])
        if before is None:
            return lambda x, w, training: F.avg_pool2d(x[0], s["kernel"], s["stride"], pad)
        return lambda x, w, training: F.avg_pool2d(F.pad(x[0], before), s["kernel"], s["stride"])
    if kind == "global_avg_pool":
        return lambda x, w, training: x[0].mean((2, 3))
    if kind == "lrn":
        # Here, too, alpha is divided by size.
        return lambda x, w, training: F.local_response_norm(x[0], s["size"], s["alpha"], s["beta"], s["k"])
    if kind == "dropout":
        return lambda x, w, training: F.dropout(x[0], s["rate"], training)
    if kind == "batch_norm":
        return lambda x, w, training: F.batch_norm(x[0], None, None, w[0], w[1], True, 0.0, s["epsilon"])
    if kind == "add":
        return lambda x, w, training: sum(x[1:], x[0])
    if kind == "concat":
        return lambda x, w, training: torch.cat(x, 1)
    if kind == "flatten":
        return lambda x, w, training: torch.flatten(x[0], 1)
    if kind == "sigmoid":
        return lambda x, w, training: torch.sigmoid(x[0])
    if kind == "gelu":
        return lambda x, w, training: F.gelu(x[0])
    if kind == "embedding":
        return lambda x, w, training: F.embedding(x[0], w[0])
    if kind == "position":
        return lambda x, w, training: x[0] + w[0]
    if kind == "lstm":
        return lstm
    if kind == "attention":
        return lambda x, w, training: attention(x[0], w, s["heads"])
    if kind == "layer_norm":
        return lambda x, w, training: F.layer_norm(x[0], x[0].shape[-1:], w[0], w[1], s["epsilon"])
    if kind == "last":
        return lambda x, w, training: x[0][:, -1]
    if kind == "mean_steps":
        return lambda x, w, training: x[0].mean(1)
    raise ValueError("layer %s: kind %r is unknown" % (layer["name"], kind))


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, device, dtype, mode):
        self._device = device
        self._batch = batch
        self._cuda = device.type == "cuda"
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
        self._channels_last = mode == "channels_last"
        self._weights = {
            name: self._formatted(torch.tensor(values, device=device)).requires_grad_()
            for name, values in weights.items()
        }
        self._layers = []
        for layer in network["layers"]:
            tensors = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            self._layers.append((layer["name"], layer["inputs"], tensors, operation(layer)))
        self._recurrent = any(layer["kind"] == "lstm" for layer in network["layers"])
        self._grouped = any(layer["settings"].get("groups", 1) > 1 for layer in network["layers"])
        self._drops = any(layer["kind"] == "dropout" for layer in network["layers"])
        self._learning_rate = learning_rate
        if mode == "compile":
            # A child may build one network after the other; what was compiled for the last one counts against this one.
            torch._dynamo.reset()
            self._run = torch.compile(self._forward, dynamic=False, fullgraph=True)
        else:
            self._run = self._forward

    def step(self, images, labels):
        x, y = self._to_device(images, labels)
        loss = self._loss(x, y)
        loss.backward()
        self._update()
        self._wait()
        return loss.item()

    def phases(self, images, labels):
        times = [self._now()]
        x, y = self._to_device(images, labels)
        times.append(self._now())
        loss = self._loss(x, y)
        times.append(self._now())
        loss.backward()
        times.append(self._now())
        self._update()
        times.append(self._now())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

    def gradients(self, images, labels):
        x, y = self._to_device(images, labels)
        with self._autocast:
            # Where nothing is dropped the compiled program of the step serves here, too.
            outputs = self._run(x, not self._drops)
            loss = F.cross_entropy(outputs, y)
        gradients = torch.autograd.grad(loss, list(self._weights.values()))
        arrays = self.arrays(dict(zip(self._weights, gradients)))
        return dict(arrays, outputs=outputs.detach().float().cpu().numpy(), loss=loss.detach().cpu().numpy())

    def arrays(self, tensors):
        """{parameter: array} of tensors."""
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def flops(self, images, labels):
        """Of matrix products, attention unfused. None with an LSTM, which torch 2.13 does not count.

        Backward is None with grouped convolutions, whose weight gradients it counts as if not grouped.
        """
        try:
            from torch.nn.attention import SDPBackend, sdpa_kernel
            from torch.utils.flop_counter import FlopCounterMode
        except ImportError:
            return {"forward": None, "backward": None}
        if self._recurrent:
            return {"forward": None, "backward": None}
        x, y = self._to_device(images, labels)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                loss = F.cross_entropy(self._forward(x, False), y)
            with FlopCounterMode(display=False) as backward:
                torch.autograd.grad(loss, list(self._weights.values()))
        counted = None if self._grouped else backward.get_total_flops() // self._batch
        return {"forward": forward.get_total_flops() // self._batch, "backward": counted}

    def shapes(self, images):
        found = {}
        with torch.no_grad(), self._autocast:
            self._forward(self._formatted(torch.from_numpy(images).to(self._device)), False, found)
        return found

    def parameter_count(self):
        return sum(tensor.numel() for tensor in self._weights.values())

    def device_peak_bytes(self):
        return torch.cuda.max_memory_allocated(self._device) if self._cuda else None

    def _forward(self, x, training, shapes=None):
        outputs = {"input": x}
        for name, sources, weights, run in self._layers:
            x = outputs[name] = run([outputs[source] for source in sources], weights, training)
            if shapes is not None:
                shapes[name] = list(x.shape[1:])
        return x

    def _loss(self, x, y):
        with self._autocast:
            return F.cross_entropy(self._run(x, True), y)

    def _update(self):
        # Written out: importing torch.optim takes longer than importing torch, and does the same here.
        with torch.no_grad():
            for tensor in self._weights.values():
                tensor.add_(tensor.grad, alpha=-self._learning_rate)
                tensor.grad = None

    def _to_device(self, images, labels):
        x = self._formatted(torch.from_numpy(images).to(self._device))
        return x, torch.from_numpy(labels).to(self._device)

    def _formatted(self, tensor):
        if self._channels_last and tensor.dim() == 4:
            return tensor.to(memory_format=torch.channels_last)
        return tensor

    def _wait(self):
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _now(self):
        self._wait()
        return time.perf_counter()


class LayeredTrainer(Trainer):
    """A trainer whose layers run one by one."""

    _hook_s = None

    def profiled_step(self, images, labels):
        """A whole step with a time stamp wherever a layer begins: around its forward call, and in a hook on its output,

        which autograd calls when it has that output's gradient and turns to the layer. So what lies between two stamps
        belongs to what began at the first; between two layers of forward lies the loop that calls them. What a hook
        costs is measured apart and taken off each stretch that holds one.
        """
        if self._hook_s is None:
            self._hook_s = seconds_of_a_hook(self._now, self._device)
        stamps = []

        def began(part):
            stamps.append((part, self._now()))

        began("h2d")
        x, y = self._to_device(images, labels)
        outputs = {"input": x}
        with self._autocast:
            for name, sources, weights, run in self._layers:
                inputs = [outputs[source] for source in sources]
                began(("forward_s", name))
                output = outputs[name] = run(inputs, weights, True)
                began("instruments")
                # A layer that hands on its input has nothing to do in backward.
                if output.requires_grad and not any(output is tensor for tensor in inputs):
                    output.register_hook(lambda gradient, name=name: began(("backward_s", name)))
                began("dispatch")
            began("loss")
            loss = F.cross_entropy(output, y)
        # As in a plain step: what backward does not need is free before it begins.
        del outputs, inputs, output
        loss.backward()
        began("update")
        self._update()
        self._wait()
        loss.item()
        began("end")
        return told(stamps, self._hook_s, [name for name, _, _, _ in self._layers])

    def layer_times(self, images, labels):
        return self.layer_by_layer(images, labels)[0]

    def layer_by_layer(self, images, labels):
        """(layer times, {parameter: gradient})."""
        x, y = self._to_device(images, labels)
        outputs, runs = {"input": x}, []
        for name, sources, weights, run in self._layers:
            # Cut from the layers before, so that backward, too, runs one layer at a time.
            inputs = [outputs[source].detach().requires_grad_(outputs[source].requires_grad) for source in sources]
            start = self._now()
            with self._autocast:
                output = run(inputs, weights, True)
            forward_s = self._now() - start
            outputs[name] = output
            runs.append((name, sources, weights, inputs, output, forward_s))
        last = outputs[self._layers[-1][0]].detach().requires_grad_()
        upstream = {self._layers[-1][0]: torch.autograd.grad(F.cross_entropy(last, y), last)[0]}
        times, found = [], {}
        for name, sources, weights, inputs, output, forward_s in reversed(runs):
            start = self._now()
            if output.requires_grad:
                wanted = [(source, tensor) for source, tensor in zip(sources, inputs) if tensor.requires_grad]
                tensors = [tensor for _, tensor in wanted] + weights
                gradients = torch.autograd.grad(output, tensors, upstream.pop(name))
                for (source, _), gradient in zip(wanted, gradients):
                    upstream[source] = upstream[source] + gradient if source in upstream else gradient
                found.update(zip(weights, gradients[len(wanted) :]))
            backward_s = self._now() - start
            times.append({"layer": name, "forward_s": forward_s, "backward_s": backward_s})
        return times[::-1], {name: found[tensor] for name, tensor in self._weights.items()}
