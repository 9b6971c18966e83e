"""The child process and its protocol, with a framework of a few lines that needs numpy only."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from steptime import frameworks, networks
from steptime.core.errors import InputError
from steptime.frameworks import Child, ChildError, Setting, child, installed_version, settings

STUB = """
import os, sys, threading, time
import numpy as np
CHANNELS_LAST = False

def versions():
    print("a print of the framework's own")
    os.system("echo and one of a program")
    return {"framework": "1.2", "blas": "none"}

def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if learning_rate == 14:
        raise NotImplementedError("layer conv1: no such thing")
    if learning_rate == 15:
        np.ones(2 ** 30)
    if learning_rate == 16:
        sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\\n")
        os.abort()
    if learning_rate == 17:
        threading.Thread(target=spin, daemon=True).start()
    if learning_rate == 13:
        raise RuntimeError("first line\\nsecond line")
    return Trainer(network, weights)

def spin():
    while True:
        sum(range(1000))

class Trainer(object):
    def __init__(self, network, weights):
        self.network, self.weights, self.count = network, weights, 0
    def step(self, images, labels):
        assert images.dtype == np.float32 and labels.dtype == np.int64
        self.count += 1
        if self.count > 1000:
            sys.stderr.write("the last words\\n")
            os.kill(os.getpid(), 9)
        return float(images.mean())
    def phases(self, images, labels):
        return {"h2d": 0.0, "forward": 1.0, "backward": 2.0, "update": 3.0}
    def layer_times(self, images, labels):
        time.sleep(float(os.environ.get("STUB_SLEEP", "0")))
        return [{"layer": "fc1", "forward_s": 1.0, "backward_s": 2.0}]
    def gradients(self, images, labels):
        return dict(self.weights, outputs=images, loss=np.float32(0.5))
    def flops(self, images, labels):
        return {"forward": 1, "backward": None}
    def shapes(self, images):
        return {layer["name"]: layer["out_shape"] for layer in self.network["layers"]}
    def parameter_count(self):
        return sum(weight.size for weight in self.weights.values())
    def device_peak_bytes(self):
        return None
"""

NETWORK = json.loads(networks.build("lenet").to_json())
BUILD = {"network": NETWORK, "batch": 4, "dtype": "float32", "threads": 1, "seed": 3, "learning_rate": 0.1}


@pytest.fixture
def stub(tmp_path, monkeypatch) -> str:
    adapter = tmp_path / "stub.py"
    adapter.write_text(STUB)
    monkeypatch.setitem(settings.SETTINGS, "stub", Setting("stub", adapter, ("numpy",), "eager"))
    return "stub"


@pytest.fixture
def built(stub):
    with Child(stub) as process:
        process.request("build", **BUILD)
        yield process


def test_hello_answers_through_the_frameworks_prints(stub):
    with Child(stub) as process:
        hello = process.request("hello")
    assert hello["versions"] == {"framework": "1.2", "blas": "none", "python": sys.version.split()[0]}
    assert 0 < hello["timer_resolution_s"] < 1e-3
    assert hello["gpu"] is None


def test_build_answers_counts_and_shapes(stub):
    with Child(stub) as process:
        answer = process.request("build", **BUILD)
    assert answer["parameters"] == 431_080
    assert answer["shapes"]["pool1"] == [20, 12, 12]


def test_steps_carry_their_covariates(built):
    answer = built.request("steps", count=5)
    assert len(answer["samples"]) == 5
    for sample in answer["samples"]:
        assert sample["time_s"] >= sample["io_s"] > 0
        assert sample["cpu_s"] > 0
        assert sample["run_delay_s"] >= 0
        assert sample["involuntary_switches"] >= 0
        assert sample["steal_s"] >= 0
    assert answer["loss_first"] != answer["loss_last"]


def test_other_commands(built, tmp_path):
    assert built.request("bare", count=3)["total_s"] > 0
    phases = built.request("phases", count=2)["samples"]
    assert [set(sample) for sample in phases] == [{"io", "h2d", "forward", "backward", "update"}] * 2
    with pytest.raises(ChildError, match="no instruments inside a whole step"):
        built.request("profile", count=1)
    assert built.request("layers", count=2)["samples"] == [[{"layer": "fc1", "forward_s": 1.0, "backward_s": 2.0}]] * 2
    assert built.request("flops") == {"forward": 1, "backward": None}
    assert 1e6 < built.request("memory")["peak_bytes"] < 1e9
    assert built.request("gradients", path=str(tmp_path / "g.npz")) == {"loss": 0.5}
    with np.load(tmp_path / "g.npz") as arrays:
        assert arrays["conv1/weight"].shape == (20, 1, 5, 5)
        assert arrays["outputs"].shape == (4, 1, 28, 28)


def test_weights_and_images_are_the_seeds(stub, tmp_path):
    found = []
    for number, seed in enumerate((3, 3, 4)):
        with Child(stub) as process:
            process.request("build", **{**BUILD, "seed": seed})
            process.request("gradients", path=str(tmp_path / f"{number}.npz"))
        with np.load(tmp_path / f"{number}.npz") as arrays:
            found.append(dict(arrays))
    for key in ("conv1/weight", "ip2/bias", "outputs"):
        assert np.array_equal(found[0][key], found[1][key])
        assert not np.array_equal(found[0][key], found[2][key])
    weight = found[0]["ip1/weight"]
    assert np.std(weight) == pytest.approx(np.sqrt(2 / 800), rel=0.01)


def test_prefetch_reads_the_same_batches(stub):
    losses = []
    for mode in ("sequential", "prefetch"):
        with Child(stub) as process:
            process.request("build", **BUILD, input=mode)
            losses.append([process.request("steps", count=1)["loss_first"] for _ in range(6)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6


def test_prefetching_ends_when_another_network_is_built(stub):
    with Child(stub) as process:
        for _ in range(3):
            process.request("build", **BUILD, input="prefetch")
            process.request("steps", count=2)
        process.request("build", **BUILD)
        threads = psutil.Process(process.pid).num_threads
        wait_until(lambda: threads() == 1)


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(child, "SCRATCH", tmp_path / "scratch")
    return tmp_path / "scratch"


COLOUR = json.loads(networks.build("alexnet", width=0.125, image=67).to_json())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("network", [NETWORK, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("reading", ["jpeg-0", "jpeg-2"])
def test_decoded_pixels_are_pillows(stub, scratch, tmp_path, channels_last, network, reading):
    (tmp_path / "stub.py").write_text(STUB.replace("CHANNELS_LAST = False", f"CHANNELS_LAST = {channels_last}"))
    with Child(stub) as process:
        process.request("build", **{**BUILD, "network": network}, input=reading)
        process.request("gradients", path=str(tmp_path / "g.npz"))
    with np.load(tmp_path / "g.npz") as arrays:
        images = arrays["outputs"] if channels_last else arrays["outputs"].transpose(0, 2, 3, 1)
    files = sorted(scratch.glob("*/*.jpg"))
    assert len(files) == 4 * BUILD["batch"]
    for image, file in zip(images, files, strict=False):
        pixels = np.asarray(Image.open(file), dtype=np.float32)
        assert np.array_equal(image.reshape(pixels.shape), (pixels - 128) / 64)
    assert pixels.std() > 10, "there is something on it"


def test_every_jpeg_input_reads_the_same_batches_from_the_same_files(stub, scratch):
    """The trained batches' means: twelve batches are three times the files, each time in another order."""
    losses, times = [], []
    for mode in ("jpeg-0", "jpeg-1", "jpeg-2"):
        with Child(stub) as process:
            process.request("build", **BUILD, input=mode)
            losses.append([process.request("steps", count=1)["loss_first"] for _ in range(12)])
        times.append([file.stat().st_mtime_ns for file in sorted(scratch.glob("*/*.jpg"))])
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) == 12
    assert times[0] == times[1] == times[2], "made once"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "00003.jpg").unlink(),
        lambda folder: (folder / "00003.jpg").write_bytes((folder / "00003.jpg").read_bytes()[:100]),
        lambda folder: (folder / "00003.jpg").write_bytes((folder / "00004.jpg").read_bytes()),
        lambda folder: (folder / "complete").unlink(),
        lambda folder: (folder / "complete").write_bytes(b"\xff"),
    ],
    ids=["a file is gone", "a file is cut", "a file is another", "not said to be whole", "not text"],
)
def test_files_that_are_not_those_that_were_written_are_made_anew(stub, scratch, damage):
    def built() -> dict[str, bytes]:
        with Child(stub) as process:
            process.request("build", **BUILD, input="jpeg-0")
            process.request("steps", count=4)
        (folder,) = [path for path in scratch.iterdir() if path.is_dir()]
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = built()
    (folder,) = [path for path in scratch.iterdir() if path.is_dir()]
    damage(folder)
    # what a child leaves that is killed while it writes
    (scratch / f"{folder.name}.part").mkdir()
    (scratch / f"{folder.name}.part" / "00000.jpg").write_text("half")
    assert built() == first


def test_loaders_go_with_their_child_and_their_network(stub, scratch):
    with Child(stub) as process:
        for count in (1, 2):
            process.request("build", **BUILD, input=f"jpeg-{count}")
            process.request("settle")
            loaders = psutil.Process(process.pid).children()
            assert len(loaders) == count, "those of the network before are gone"
    wait_until(lambda: not any(loader.is_running() for loader in loaders))
    with Child(stub) as process:
        process.request("build", **BUILD, input="jpeg-2")
        loaders = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, loaders)))


def test_a_loader_that_dies_is_one_line(stub, scratch):
    with Child(stub) as process:
        process.request("build", **BUILD, input="jpeg-1")
        (loader,) = psutil.Process(process.pid).children()
        loader.kill()
        with pytest.raises(ChildError, match="a loader process ended with status -9"):
            process.request("steps", count=20)


def test_no_pillow_and_no_images_are_unsupported_inputs(stub, scratch, tmp_path, monkeypatch):
    tokens = {**NETWORK, "vocabulary": 50, "input_shape": [7]}
    with Child(stub) as process, pytest.raises(ChildError, match="only grey and colour images") as caught:
        process.request("build", **{**BUILD, "network": tokens}, input="jpeg-1")
    assert caught.value.kind == "unsupported"
    (tmp_path / "PIL.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Child(stub) as process, pytest.raises(ChildError, match="input jpeg-0: needs Pillow") as caught:
        process.request("build", **BUILD, input="jpeg-0")
    assert caught.value.kind == "unsupported"


def test_an_idle_child_blocks_and_one_that_spins_is_found_out(stub, scratch):
    """Whatever it reads from, it has used no time after `settle`, nor have its loaders."""
    for mode in ("sequential", "prefetch", "jpeg-2"):
        with Child(stub) as process:
            process.request("build", **BUILD, input=mode)
            process.request("steps", count=1)
            process.request("settle")
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            before = [each.cpu_times()[:2] for each in family]
            time.sleep(0.3)
            assert [each.cpu_times()[:2] for each in family] == before
    with Child(stub) as process:
        process.request("build", **{**BUILD, "learning_rate": 17})
        with pytest.raises(ChildError, match=r"its threads take \d+ % of a core while they have nothing to do"):
            process.request("settle")


def test_what_cannot_be_expressed_and_what_needs_too_much_memory_are_kinds_of_their_own(stub):
    with Child(stub) as process, pytest.raises(ChildError, match="no such thing") as caught:
        process.request("build", **{**BUILD, "learning_rate": 14})
    assert caught.value.kind == "unsupported"
    with Child(stub, memory_limit_bytes=2**30) as process:
        with pytest.raises(ChildError, match="MemoryError") as caught:
            process.request("build", **{**BUILD, "learning_rate": 15})
        assert caught.value.kind == "out_of_memory"
        assert process.request("hello"), "it serves on"
    with Child(stub) as process, pytest.raises(ChildError, match=r"SIGABRT; it said: .*bad_alloc") as caught:
        process.request("build", **{**BUILD, "learning_rate": 16})
    assert caught.value.kind == "out_of_memory"


def test_inference_only_has_no_step(stub, tmp_path):
    (tmp_path / "stub.py").write_text(STUB + "INFERENCE_ONLY = True\n")
    with Child(stub) as process:
        assert process.request("hello")["inference_only"]
        process.request("build", **BUILD)
        with pytest.raises(ChildError, match="inference only") as caught:
            process.request("steps", count=1)
        assert caught.value.kind == "unsupported"
        assert process.request("phases", count=1)["samples"]


def test_hello_tells_what_decides_threads_and_compilers(stub, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_something=1")
    monkeypatch.setenv("A_SECRET", "x")
    with Child(stub, threads=2) as process:
        variables = process.request("hello")["variables"]
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["XLA_FLAGS"] == "--xla_cpu_something=1"
    assert "A_SECRET" not in variables
    assert "PATH" not in variables


@pytest.fixture
def worker_module():
    spec = importlib.util.spec_from_file_location("worker_under_test", child.WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_out_of_memory_is_known_in_each_frameworks_words(worker_module):
    aborted = (
        "Operation received an exception:Status: 1, message: could not create a primitive, in file mkl_conv_ops.cc"
    )
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 11059200 bytes."),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA: 2 GiB"),
        type("ResourceExhaustedError", (Exception,), {})("OOM when allocating tensor"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 10 bytes."),
        type("AbortedError", (Exception,), {})(f"Graph execution error: {aborted}"),
    ):
        assert worker_module.error_kind(error) == "out_of_memory", error
    assert worker_module.error_kind(NotImplementedError("layer a: no")) == "unsupported"
    assert worker_module.error_kind(RuntimeError(aborted.replace("Status: 1", "Status: 3"))) == "error"


def test_a_long_error_keeps_its_beginning_and_its_end(worker_module):
    text = worker_module.shortened("Graph error:\n" + 1000 * "at a line " + "\nthe cause")
    assert len(text) == 500
    assert text.startswith("Graph error: at")
    assert text.endswith("the cause")


def test_energy_is_that_of_the_packages_also_where_the_counter_starts_over(worker_module, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "POWERCAP", str(tmp_path))

    def plant(**counters: int) -> None:
        for name, energy_uj in counters.items():
            folder = tmp_path / {"first": "intel-rapl:0", "second": "intel-rapl:1", "core": "intel-rapl:0:0",
                                 "all": "intel-rapl:2"}[name]  # fmt: skip
            folder.mkdir(exist_ok=True)
            (folder / "name").write_text({"core": "core\n", "all": "psys\n"}.get(name, "package-0\n"))
            (folder / "energy_uj").write_text(f"{energy_uj}\n")
            (folder / "max_energy_range_uj").write_text("262143328850\n")

    assert worker_module.Meter("cpu").read()["energy_j"] is None, "nothing is there"
    plant(first=1_000_000, second=262_143_000_000, core=5, all=7)
    meter = worker_module.Meter("cpu")
    plant(first=4_500_000, second=1_671_150, core=10**9, all=10**9)
    assert meter.read()["energy_j"] == pytest.approx(3.5 + 2.0)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.read()["energy_j"] is None, "half of it would be wrong"


def test_energy_and_activity_of_a_gpu_are_the_drivers(worker_module, monkeypatch):
    class Driver:
        NVMLError = RuntimeError
        millijoules = iter([5_000, 7_500])
        shares = iter([50, 100])

        def nvmlDeviceGetTotalEnergyConsumption(self, handle):
            return next(self.millijoules)

        def nvmlDeviceGetUtilizationRates(self, handle):
            return SimpleNamespace(gpu=next(self.shares))

    monkeypatch.setattr(worker_module, "gpu_handle", lambda: (Driver(), 0))
    meter = worker_module.Meter("cuda")
    meter.after_step()
    meter.after_step()
    assert meter.read() == {"energy_j": 2.5, "gpu_active_share": 0.75}
    assert worker_module.Meter("cpu").read()["gpu_active_share"] is None


BAD_REQUESTS = [
    ("nonsense", {}, "unknown command 'nonsense'"),
    ("_adapter", {}, "unknown command '_adapter'"),
    ("steps", {"count": 0}, "count = 0"),
    ("phases", {"count": -1}, "count = -1"),
    ("steps", {"wrong": 1}, "wrong"),
    ("build", {**BUILD, "learning_rate": 13}, "first line second line"),
    ("build", {**BUILD, "input": "backwards"}, "backwards"),
    ("build", {**BUILD, "dtype": "int4"}, "int4"),
    ("gradients", {"path": "/nowhere/at/all.npz"}, "nowhere"),
]


@pytest.mark.parametrize(("command", "arguments", "named"), BAD_REQUESTS)
def test_a_bad_request_is_one_line_and_the_child_serves_on(built, command, arguments, named):
    with pytest.raises(ChildError, match=named) as caught:
        built.request(command, **arguments)
    assert "\n" not in str(caught.value)
    assert built.request("hello")["versions"]["framework"] == "1.2"


def test_steps_before_build(stub):
    with Child(stub) as process, pytest.raises(ChildError, match="send build first"):
        process.request("steps", count=1)


def test_a_missing_framework_is_one_line(stub, tmp_path):
    (tmp_path / "stub.py").write_text("import a_framework_that_is_not_here")
    with Child(stub) as process, pytest.raises(ChildError, match="a_framework_that_is_not_here") as caught:
        process.request("hello")
    assert "\n" not in str(caught.value)


def test_a_line_that_is_not_json_is_answered(stub):
    with Child(stub) as process:
        process._write(b"{not json\n")
        assert "error" in json.loads(process._read_line("hello", 30))
        assert process.request("hello")


def test_sigkill_is_one_line(built):
    os.kill(built.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match="ended by SIGKILL, as the system does when memory runs out") as caught:
        built.request("steps", count=1)
    assert "\n" not in str(caught.value)
    assert caught.value.kind == "out_of_memory"
    with pytest.raises(ChildError):
        built.request("hello")


def test_death_in_a_step_quotes_the_last_words(built):
    with pytest.raises(ChildError, match=r"steps: .* by SIGKILL, .* runs out; it said: the last words"):
        built.request("steps", count=2000)


def test_no_answer_in_time_ends_the_child(stub, monkeypatch):
    monkeypatch.setenv("STUB_SLEEP", "60")
    with Child(stub) as process:
        process.request("build", **BUILD)
        with pytest.raises(ChildError, match=r"layers: no answer in 0.2 s"):
            process.request("layers", count=1, timeout_s=0.2)
        assert not psutil.pid_exists(process.pid)
        with pytest.raises(ChildError, match=r"ended by SIGKILL$") as caught:
            process.request("hello")
        assert caught.value.kind == "error", "it was ended here, not by the system"


def test_exit_and_close_end_the_child(stub):
    with Child(stub) as process:
        assert process.request("exit") == {}
        assert process._process.wait(timeout=10) == 0
    with Child(stub) as process:
        pid = process.pid
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)
    with pytest.raises(ChildError, match="closed"):
        process.request("hello")


def test_the_child_ignores_the_terminals_interrupt(built):
    os.kill(built.pid, signal.SIGINT)
    assert built.request("hello")


def test_cores_threads_and_device_reach_the_child(stub):
    core = min(os.sched_getaffinity(0))
    with Child(stub, cores=[core], threads=3) as process:
        process.request("hello")
        about = psutil.Process(process.pid)
        assert about.cpu_affinity() == [core]
        environment = about.environ()
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    with Child(stub, device="cuda") as process:
        hello = process.request("hello")
        assert psutil.Process(process.pid).environ().get("CUDA_VISIBLE_DEVICES") != ""
    assert hello["gpu"] is None or hello["gpu"]["model"]


def test_unknown_names_are_input_errors():
    with pytest.raises(InputError, match="known: torch, "):
        Child("torsh")
    with pytest.raises(InputError, match="cpu, cuda"):
        Child("torch", device="tpu")
    with pytest.raises(InputError, match="torsh"):
        installed_version("torsh")


@pytest.mark.parametrize("busy", [False, True])
def test_the_child_dies_with_its_parent(tmp_path, busy):
    """Idle, it would notice stdin's end; in the middle of a command only the kernel's signal reaches it."""
    adapter = tmp_path / "stub.py"
    adapter.write_text(STUB)
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, time
        from pathlib import Path
        from steptime.frameworks import Child, Setting, settings
        settings.SETTINGS["stub"] = Setting("stub", Path({str(adapter)!r}), ("numpy",), "eager")
        child = Child("stub")
        child.request("build", **json.loads({json.dumps(BUILD)!r}))
        if {busy}:
            child._write(b'{{"command": "layers", "count": 1}}\\n')
        print(child.pid, flush=True)
        time.sleep(60)
        """)
    )
    environment = {**os.environ, "STUB_SLEEP": "60"}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_installed_version_and_import_load_no_framework():
    code = (
        "import sys; from steptime import frameworks as f; print(f.installed_version('torch'));"
        "print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert output[0].startswith(("2.", "None"))
    assert output[1] == "[]"


def test_no_version_of_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(settings.SETTINGS, "gone", Setting("gone", Path("x.py"), ("not-a-distribution",), "eager"))
    assert frameworks.installed_version("gone") is None


FILES = [child.WORKER, child.WORKER.with_name("jpegs.py"), *sorted(settings.ADAPTERS.glob("*.py"))]
OLD = sorted(Path.home().glob(".pyenv/versions/3.[678].*/bin/python"))


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8"])
def test_old_interpreters_compile_what_they_run(version, tmp_path):
    found = [python for python in OLD if python.parts[-3].startswith(version + ".")]
    if not found:
        pytest.skip(f"no Python {version} under ~/.pyenv/versions")
    for file in FILES:
        code = f"import py_compile; py_compile.compile({str(file)!r}, {str(tmp_path / 'x.pyc')!r}, doraise=True)"
        subprocess.run([str(found[0]), "-c", code], check=True)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)
