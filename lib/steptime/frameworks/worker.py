"""The child process: builds a network in one framework and times it, told by JSON lines on stdin.

Run as `python worker.py ADAPTER.py OPTIONS`, OPTIONS a JSON object: device ("cpu" or "cuda"), cores (the only ones it
may use, or null), parent (the process whose death ends this one), mode and dtypes (the setting's), scratch (a folder
for files that are made once), memory_limit_bytes (of private memory, or null). Standard library, numpy and the
adapter's framework only; Python >= 3.6. What an adapter has to offer is in adapters/__init__.py; the commands are the
methods of Worker whose names do not begin with an underscore. A request is {"command": name, ...arguments}, an answer
one JSON object a line; {"error": "one line", "kind": ChildError's} when the command failed, after which the next one is
served.

Times are seconds of time.perf_counter; a step's time includes reading its batch and ends in a device synchronisation.
"""

import ctypes
import gc
import importlib.util
import json
import os
import platform
import queue
import re
import resource
import signal
import sys
import threading
import time
import traceback

import numpy as np

POOL_BATCHES = 4
OFFSET = np.float32(128)
SCALE = np.float32(1 / 64)
INPUTS = ("sequential", "prefetch", "jpeg-0", "jpeg-1", "jpeg-2")
POWERCAP = "/sys/class/powercap"
IDLE_SHARE = 0.2
IDLE_WAIT_S = 5.0
TELLING = re.compile(
    "(?!TF_CLI|TF_CPP)(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|XLA|TF|JAX|KERAS|TORCH|TORCHINDUCTOR|THEANO|MXNET"
    "|CHAINER|CNTK|MALLOC)_|NVIDIA_TF32_OVERRIDE$"
)
"""Environment variables that decide threads, compilers, memory or arithmetic."""
PR_SET_PDEATHSIG = 1
ONEDNN = "exception:status: 1, "
"""Part of TensorFlow's message when oneDNN says dnnl_out_of_memory, which is 1 in dnnl_status_t."""


def error_kind(error):
    """Which of ChildError's kinds an exception of an adapter or its framework is."""
    if isinstance(error, NotImplementedError):
        return "unsupported"
    name, text = type(error).__name__, str(error).lower()
    signs = (
        "out of memory",
        "can't allocate memory",
        "cannot allocate memory",
        "resource_exhausted",
        "bad_alloc",
        ONEDNN,
    )
    if isinstance(error, MemoryError) or name in ("OutOfMemoryError", "ResourceExhaustedError", "bad_alloc"):
        return "out_of_memory"
    return "out_of_memory" if any(sign in text for sign in signs) else "error"


class Pool(object):
    """Samples read in shuffled order. A subclass has `labels`, `batch`, `_random` and `_prepared(chosen)`."""

    _order = np.arange(0)

    def chosen(self):
        """The numbers of the next batch's samples."""
        if len(self._order) < self.batch:
            self._order = self._random.permutation(len(self.labels))
        chosen, self._order = self._order[: self.batch], self._order[self.batch :]
        return chosen

    def read(self):
        """The next batch: (images or tokens, labels)."""
        return self._prepared(self.chosen())

    def first(self):
        """The same batch each time: the pool's first."""
        return self._prepared(np.arange(self.batch))

    def settle(self):
        """Nothing is read ahead."""

    def close(self):
        """Nothing to end."""


class Tokens(Pool):
    """A fixed pool of token sequences and their labels, from a seed; each class has token frequencies of its own.

    `shape` is (steps,); tokens are int64 below `vocabulary`.
    """

    def __init__(self, shape, vocabulary, classes, batch, seed):
        random = np.random.RandomState(seed)
        count = POOL_BATCHES * batch
        self.batch = batch
        self.labels = random.randint(0, classes, size=count).astype(np.int64)
        favoured = random.randint(0, vocabulary, size=(classes, 8))
        noise = random.randint(0, vocabulary, size=(count, *shape))
        chosen = favoured[self.labels[:, None], random.randint(0, 8, size=noise.shape)]
        self.tokens = np.where(random.uniform(size=noise.shape) < 0.5, chosen, noise).astype(np.int64)
        self._random = random

    def _prepared(self, chosen):
        return self.tokens[chosen], self.labels[chosen]


class Images(Pool):
    """A fixed pool of uint8 images and their labels, from a seed; each class has a coarse pattern under noise.

    `shape` is (channels, height, width); `channels_last`: a batch is (batch, height, width, channels) instead of
    (batch, channels, height, width), and the pool is stored like that.
    """

    def __init__(self, shape, classes, batch, seed, channels_last):
        random = np.random.RandomState(seed)
        channels, height, width = shape
        count = POOL_BATCHES * batch
        self.batch = batch
        self.labels = random.randint(0, classes, size=count).astype(np.int64)
        patterns = random.randint(0, 256, size=(classes, channels, 4, 4)).astype(np.uint8)
        rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
        self.images = np.empty((count, channels, height, width), np.uint8)
        for number, label in enumerate(self.labels):
            noise = random.randint(0, 256, size=shape).astype(np.uint16)
            self.images[number] = (noise + patterns[label][:, rows][:, :, columns]) // 2
        self.channels_last = channels_last
        if channels_last:
            self.images = np.ascontiguousarray(self.images.transpose(0, 2, 3, 1))
        self._random = random

    def _prepared(self, chosen):
        """Gathered, converted to float32 and scaled."""
        images = self.images[chosen].astype(np.float32)
        images -= OFFSET
        images *= SCALE
        return images, self.labels[chosen]


class Prefetched(object):
    """Reads ahead by one batch in a thread, which sleeps while that batch waits to be taken."""

    def __init__(self, images):
        self._ready = queue.Queue(maxsize=1)
        self._open = True
        self.first = images.first
        thread = threading.Thread(target=self._fill, args=(images,))
        thread.daemon = True
        thread.start()

    def _fill(self, images):
        while self._open:
            self._ready.put(images.read())

    def settle(self):
        """Wait until the next batch is there."""
        while not self._ready.full():
            time.sleep(0.001)

    def close(self):
        """Let the thread end: it waits for room, or soon will."""
        self._open = False
        self._ready.get()

    def read(self):
        return self._ready.get()


def initial_weights(network, seed):
    """{parameter name: float32 array in the description's layout}, the same in every framework.

    He et al. 2015 for weights (normal, variance 2 / fan-in); scales about 1, biases and shifts about 0, none exactly,
    so that a framework that leaves one out is found out.
    """
    random = np.random.RandomState(seed)
    weights = {}
    for layer in network["layers"]:
        for parameter in layer["parameters"]:
            name, shape = parameter["name"], parameter["shape"]
            values = random.standard_normal(size=shape)
            if name.endswith("weight"):
                values *= np.sqrt(2 / np.prod(shape[1:]))
            else:
                values *= 0.01
                values += 1 if name.endswith("/scale") else 0
            weights[name] = values.astype(np.float32)
    return weights


class Covariates(object):
    """What else happened during a sample. Read outside the timed region; a value the system lacks is None."""

    def __init__(self):
        self._cores = {"cpu%d" % core for core in os.sched_getaffinity(0)}
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def run_delay_s(self):
        """Time that this process' threads were ready to run but waited for a core."""
        total = 0
        try:
            for task in os.listdir("/proc/self/task"):
                with open("/proc/self/task/%s/schedstat" % task) as file:
                    total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return total * 1e-9

    def steal_s(self):
        """Time that the hypervisor took from the cores this process may use."""
        total = 0
        try:
            with open("/proc/stat") as file:
                for line in file:
                    fields = line.split()
                    if fields and fields[0] in self._cores:
                        total += int(fields[8])
        except (OSError, IndexError, ValueError):
            return None
        return total * self._tick_s


def difference(before, after):
    """What a counter rose by; threads that ended take their share with them, hence not below 0."""
    return None if before is None or after is None else max(0.0, after - before)


class Worker(object):
    """The commands. `build` comes before all but `hello`."""

    def __init__(self, adapter_path, options):
        self._adapter_path = adapter_path
        self._device = options["device"]
        self._mode = options["mode"]
        self._dtypes = options["dtypes"]
        self._scratch = options["scratch"]
        self._loaded = None
        self._trainer = None
        self._source = None

    def hello(self):
        adapter = self._adapter()
        versions = dict(adapter.versions(), python=platform.python_version())
        timer = time.get_clock_info("perf_counter").implementation
        gpu = gpu_state() if self._device == "cuda" else None
        return {
            "versions": versions,
            "timer": timer,
            "timer_resolution_s": timer_resolution_s(),
            "gpu": gpu,
            "variables": {name: value for name, value in os.environ.items() if TELLING.match(name)},
            "inference_only": self._inference_only(),
        }

    def build(self, network, batch, threads, seed, learning_rate, dtype="float32", input="sequential"):
        if input not in INPUTS:
            raise ValueError("input = %r: unknown; known: %s" % (input, ", ".join(INPUTS)))
        if dtype not in self._dtypes:
            raise NotImplementedError("dtype = %r: not in this setting; known: %s" % (dtype, ", ".join(self._dtypes)))
        adapter = self._adapter()
        self._close()
        self._source = source_of(pool_of(adapter, network, batch, seed), input, self._scratch)
        weights = initial_weights(network, seed)
        start = time.perf_counter()
        self._trainer = adapter.build(
            network, weights, batch, threads, learning_rate, seed, self._device, dtype, self._mode
        )
        return {
            "build_s": time.perf_counter() - start,
            "parameters": self._trainer.parameter_count(),
            "shapes": self._trainer.shapes(self._source.first()[0]),
        }

    def describe(self):
        """The network as the adapter found it, where it is not told what it is."""
        trainer = self._ready()
        if not hasattr(trainer, "describe"):
            raise NotImplementedError("this setting is told what the network is")
        return trainer.describe(self._source.first()[0])

    def steps(self, count):
        check_count(count)
        step, read, covariates = self._stepping(), self._source.read, Covariates()
        losses, samples, meter = [], [], Meter(self._device)
        delay, steal = covariates.run_delay_s(), covariates.steal_s()
        for _ in range(count):
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            cpu = time.process_time()
            start = time.perf_counter()
            images, labels = read()
            after_io = time.perf_counter()
            losses.append(step(images, labels))
            end = time.perf_counter()
            cpu = time.process_time() - cpu
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
            delay_before, steal_before = delay, steal
            delay, steal = covariates.run_delay_s(), covariates.steal_s()
            samples.append(
                {
                    "start_s": start,
                    "time_s": end - start,
                    "io_s": after_io - start,
                    "cpu_s": cpu,
                    "run_delay_s": difference(delay_before, delay),
                    "involuntary_switches": switches,
                    "steal_s": difference(steal_before, steal),
                    "load_1min": os.getloadavg()[0],
                }
            )
            meter.after_step()
        return dict(meter.read(), samples=samples, loss_first=losses[0], loss_last=losses[-1])

    def bare(self, count):
        check_count(count)
        step, read = self._stepping(), self._source.read
        start = time.perf_counter()
        for _ in range(count):
            images, labels = read()
            step(images, labels)
        return {"total_s": time.perf_counter() - start}

    def phases(self, count):
        check_count(count)
        trainer, samples = self._ready(), []
        if not hasattr(trainer, "phases"):
            raise NotImplementedError("this setting runs the step whole: its phases cannot be timed")
        for _ in range(count):
            start = time.perf_counter()
            images, labels = self._source.read()
            io = time.perf_counter() - start
            samples.append(dict(trainer.phases(images, labels), io=io))
        return {"samples": samples}

    def layers(self, count):
        check_count(count)
        trainer = self._ready()
        if not hasattr(trainer, "layer_times"):
            raise NotImplementedError("this setting fuses layers: none can be timed alone")
        return {"samples": [trainer.layer_times(*self._source.read()) for _ in range(count)]}

    def profile(self, count):
        """Each repetition: a plain step, then one with the framework's instruments on, on the next batch."""
        check_count(count)
        trainer = self._ready()
        profiled_step = getattr(trainer, "profiled_step", None)
        if profiled_step is None:
            raise NotImplementedError("this setting has no instruments inside a whole step")
        samples = []
        for _ in range(count):
            images, labels = self._source.read()
            start = time.perf_counter()
            trainer.step(images, labels)
            plain_s = time.perf_counter() - start
            profile = profiled_step(*self._source.read())
            profile["parts"]["plain"] = plain_s
            samples.append(profile)
        return {"samples": samples}

    def gradients(self, path):
        arrays = self._ready().gradients(*self._source.first())
        np.savez(path, **arrays)
        return {"loss": float(arrays["loss"])}

    def flops(self):
        return self._ready().flops(*self._source.first())

    def memory(self):
        peak = self._ready().device_peak_bytes()
        return {"peak_bytes": process_peak_bytes() if peak is None else peak}

    def settle(self):
        """Return when this process will be idle until the next request: nothing read ahead, no thread spinning.

        Thread pools spin for a while after their work. Seconds waited; an error if they do not stop.
        """
        if self._source is not None:
            self._source.settle()
        start, window_s = time.perf_counter(), 0.05
        while time.perf_counter() - start < IDLE_WAIT_S:
            cpu = time.process_time()
            time.sleep(window_s)
            share = (time.process_time() - cpu) / window_s
            if share < IDLE_SHARE:
                return {"waited_s": time.perf_counter() - start}
        raise RuntimeError("its threads take %.0f %% of a core while they have nothing to do" % (100 * share))

    def _close(self):
        if self._source is not None:
            self._source.close()
        self._trainer = self._source = None

    def _inference_only(self):
        return bool(getattr(self._adapter(), "INFERENCE_ONLY", False))

    def _stepping(self):
        if self._inference_only():
            raise NotImplementedError("inference only: this setting has no training step")
        return self._ready().step

    def _adapter(self):
        if self._loaded is None:
            spec = importlib.util.spec_from_file_location("adapter", self._adapter_path)
            module = importlib.util.module_from_spec(spec)
            # Collecting garbage while a framework makes its thousands of modules finds none and costs a tenth.
            gc.disable()
            spec.loader.exec_module(module)
            gc.enable()
            self._loaded = module
        return self._loaded

    def _ready(self):
        if self._trainer is None:
            raise ValueError("no network is built; send build first")
        return self._trainer


def pool_of(adapter, network, batch, seed):
    """What the network is fed: the adapter's own pool, where it has one."""
    if hasattr(adapter, "own_samples"):
        return adapter.own_samples(network, batch, seed)
    shape, classes, vocabulary = network["input_shape"], network["classes"], network["vocabulary"]
    if vocabulary:
        return Tokens(shape, vocabulary, classes, batch, seed)
    return Images(shape, classes, batch, seed, adapter.CHANNELS_LAST)


def source_of(pool, input, scratch):
    """What the batches of `pool` are read from."""
    if input == "sequential":
        return pool
    if input == "prefetch":
        return Prefetched(pool)
    if not isinstance(pool, Images) or pool.images.shape[3 if pool.channels_last else 1] not in (1, 3):
        raise NotImplementedError("input %s: only grey and colour images can be JPEG files" % input)
    # jpegs imports this module, which runs under another name.
    sys.modules.setdefault("worker", sys.modules[__name__])
    try:
        import jpegs
    except ImportError:
        raise NotImplementedError("input %s: needs Pillow" % input) from None
    decoded = jpegs.Decoded(pool, scratch)
    loaders = int(input[-1])
    return jpegs.Loaded(decoded, loaders) if loaders else decoded


def check_count(count):
    if not isinstance(count, int) or count < 1:
        raise ValueError("count = %r: must be a whole number above 0" % (count,))


def process_peak_bytes():
    """Largest resident memory of this process since it started. ru_maxrss would include the parent's before exec."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def timer_resolution_s():
    """Smallest step seen between two readings of the timer."""
    readings = [time.perf_counter() for _ in range(1000)]
    return min(b - a for a, b in zip(readings, readings[1:]) if b > a)


def gpu_handle():
    """(the driver's Python bindings, the first visible GPU in them)."""
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)


def gpu_state():
    """What the driver says of the first visible GPU now, or None without a driver or its Python bindings."""
    try:
        pynvml, handle = gpu_handle()
        texts = [pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()]
        model, driver = [text.decode() if isinstance(text, bytes) else text for text in texts]
        return {
            "model": model,
            "driver": driver,
            "clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttle": hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except Exception as error:
        sys.stderr.write("no GPU state: %s\n" % error)
        return None


def package_energies():
    """[(microjoules counted, where the counter starts over)] of the processor packages; [] where they cannot be read.

    Linux' power capping interface, one folder intel-rapl:N a package (AMD's too); its subdomains are parts of it.
    """
    found = []
    try:
        for name in sorted(os.listdir(POWERCAP)):
            folder = os.path.join(POWERCAP, name)
            if re.match(r"intel-rapl:\d+$", name) and read_line(folder, "name").startswith("package"):
                found.append((int(read_line(folder, "energy_uj")), int(read_line(folder, "max_energy_range_uj"))))
    except (OSError, ValueError):
        return []
    return found


def read_line(folder, name):
    with open(os.path.join(folder, name)) as file:
        return file.readline().strip()


class Meter(object):
    """Energy and activity of the device that trains, from its making to `read`; None for what cannot be read.

    The CPU's energy is that of its packages, with all that runs on them; the GPU's is the board's.
    """

    def __init__(self, device):
        self._on_gpu, self._nvml, self._active = device == "cuda", None, []
        if self._on_gpu:
            try:
                self._nvml = gpu_handle()
            except Exception as error:
                sys.stderr.write("no GPU meter: %s\n" % error)
        self._before = self._energies()

    def after_step(self):
        """The driver's share of its last sampling period (up to a second) in which a kernel ran."""
        if self._nvml is not None:
            pynvml, handle = self._nvml
            try:
                self._active.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except pynvml.NVMLError:
                self._nvml = None

    def read(self):
        pairs = list(zip(self._before, self._energies()))
        energy_j = sum((after[0] - before[0]) % before[1] for before, after in pairs) * 1e-6 if pairs else None
        return {"energy_j": energy_j, "gpu_active_share": float(np.mean(self._active)) if self._active else None}

    def _energies(self):
        if not self._on_gpu:
            return package_energies()
        if self._nvml is None:
            return []
        pynvml, handle = self._nvml
        try:
            return [(1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 2**64)]
        except pynvml.NVMLError:
            return []


def shortened(text):
    """`text` as one line of 500 characters at most: the beginning, and the end, where TensorFlow has the cause."""
    text = " ".join(text.split())
    return text if len(text) <= 500 else text[:200] + " ... " + text[-295:]


def answer(worker, line):
    """The answer to one request, as a dict."""
    try:
        arguments = json.loads(line)
        command = arguments.pop("command")
        if command.startswith("_") or not callable(getattr(worker, command, None)):
            raise ValueError("unknown command %r" % command)
        return getattr(worker, command)(**arguments)
    except Exception as error:
        traceback.print_exc()
        return {"error": "%s: %s" % (type(error).__name__, shortened(str(error))), "kind": error_kind(error)}


def serve(worker, requests, answers):
    """Answer until stdin ends or `exit` comes; blocks in readline in between."""
    for line in iter(requests.readline, ""):
        reply = {} if line.strip() == '{"command": "exit"}' else answer(worker, line)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        if not reply:
            return


def die_with(parent):
    """Ask Linux to kill this process when the parent's thread that started it ends."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def main():
    adapter_path, options = sys.argv[1], json.loads(sys.argv[2])
    die_with(options["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options["cores"]:
        os.sched_setaffinity(0, options["cores"])
    if options["memory_limit_bytes"]:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (options["memory_limit_bytes"], most))
    # A framework's own prints go to stderr, so that stdout holds answers only.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    worker = Worker(adapter_path, options)
    serve(worker, requests, answers)
    worker._close()
    # The framework's own teardown can take seconds and has nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
