"""PyTorch. Mode "eager": one call of torch.nn.functional a layer, gradients by autograd. See adapters/__init__.py."""

import re
import time

import torch
import torch.nn.functional as F

CHANNELS_LAST = False


def versions():
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {"framework": torch.__version__, "blas": blas.group(1) if blas else "unknown"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    # float32 means float32, and each framework may pick its convolution algorithms by trial.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    return Trainer(network, weights, batch, learning_rate, torch.device(device))


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


def operation(layer):
    """The function (inputs, weights, training) -> output of one layer."""
    kind, s = layer["kind"], layer["settings"]
    if kind == "conv":
        pad, before = pad_both(s["pad"])

        def convolution(x, w, training):
            x = x[0] if before is None else F.pad(x[0], before)
            return F.conv2d(x, w[0], w[1] if s["bias"] else None, s["stride"], pad, 1, s["groups"])

        return convolution
    if kind == "dense":
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
    raise ValueError("layer %s: kind %r is unknown" % (layer["name"], kind))


class Trainer(object):
    def __init__(self, network, weights, batch, learning_rate, device):
        self._device = device
        self._batch = batch
        self._cuda = device.type == "cuda"
        self._weights = {
            name: torch.tensor(values, device=device, requires_grad=True) for name, values in weights.items()
        }
        self._layers = []
        for layer in network["layers"]:
            tensors = [self._weights[parameter["name"]] for parameter in layer["parameters"]]
            self._layers.append((layer["name"], layer["inputs"], tensors, operation(layer)))
        self._grouped = any(layer["settings"].get("groups", 1) > 1 for layer in network["layers"])
        self._learning_rate = learning_rate

    def step(self, images, labels):
        x, y = self._to_device(images, labels)
        loss = F.cross_entropy(self._forward(x, True), y)
        loss.backward()
        self._update()
        self._wait()
        return loss.item()

    def phases(self, images, labels):
        times = [self._now()]
        x, y = self._to_device(images, labels)
        times.append(self._now())
        loss = F.cross_entropy(self._forward(x, True), y)
        times.append(self._now())
        loss.backward()
        times.append(self._now())
        self._update()
        times.append(self._now())
        names = ("h2d", "forward", "backward", "update")
        return {name: end - start for name, start, end in zip(names, times, times[1:])}

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

    def gradients(self, images, labels):
        x, y = self._to_device(images, labels)
        outputs = self._forward(x, False)
        loss = F.cross_entropy(outputs, y)
        gradients = torch.autograd.grad(loss, list(self._weights.values()))
        arrays = self.arrays(dict(zip(self._weights, gradients)))
        return dict(arrays, outputs=outputs.detach().cpu().numpy(), loss=loss.detach().cpu().numpy())

    def arrays(self, tensors):
        """{parameter: array} of tensors."""
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def flops(self, images, labels):
        """Backward is None with grouped convolutions: torch 2.13 counts their weight gradients as if not grouped."""
        try:
            from torch.utils.flop_counter import FlopCounterMode
        except ImportError:
            return {"forward": None, "backward": None}
        x, y = self._to_device(images, labels)
        with FlopCounterMode(display=False) as forward:
            loss = F.cross_entropy(self._forward(x, False), y)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(loss, list(self._weights.values()))
        counted = None if self._grouped else backward.get_total_flops() // self._batch
        return {"forward": forward.get_total_flops() // self._batch, "backward": counted}

    def shapes(self, images):
        found = {}
        with torch.no_grad():
            self._forward(torch.from_numpy(images).to(self._device), False, found)
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

    def _update(self):
        # Written out: importing torch.optim takes longer than importing torch, and does the same here.
        with torch.no_grad():
            for tensor in self._weights.values():
                tensor.add_(tensor.grad, alpha=-self._learning_rate)
                tensor.grad = None

    def _to_device(self, images, labels):
        return torch.from_numpy(images).to(self._device), torch.from_numpy(labels).to(self._device)

    def _wait(self):
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _now(self):
        self._wait()
        return time.perf_counter()
