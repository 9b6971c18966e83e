"""What the programs of the frameworks' own engines share. Standard library and numpy only; Python >= 3.6.

A rank reads one job, as in torch_gloo.py (`synchronisation` is the engine's own; `mode` the adapter's), from the file
named as the argument or from stdin, and answers with one JSON object: on stdout, or as NUMBER.json in the folder that
STEPTIME_ANSWERS names, since mpirun joins what its ranks print.

An engine is an object with `losses`; `parameters`, their number; `barrier()`; `step()`, one whole step, which returns
the moments of STAMPS, None where the engine does not show it; and `averaged()`, the last step's mean gradients,
{parameter: array}, in the description's layout. Seconds of time.monotonic, which all ranks of a machine share.
"""

import importlib.util
import json
import os
import platform
import resource
import sys
import time
import traceback

import numpy as np

FOLDER = "STEPTIME_ANSWERS"
STAMPS = ("start_s", "forward_s", "backward_s", "averaged_s", "updated_s", "end_s")


def loaded(name, path):
    """The module in a file, which is in no package here."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told():
    """What this rank has to do."""
    if len(sys.argv) > 1:
        with open(sys.argv[1]) as file:
            return json.load(file)
    return json.load(sys.stdin)


def network_and_samples(job, worker, number):
    """(the adapter's trainer, the pool that worker `number` reads); every worker has the same weights."""
    adapter, network = loaded("adapter", job["adapter"]), job["network"]
    weights = worker.initial_weights(network, job["seed"])
    common = (job["batch"], job["threads"], job["learning_rate"], job["seed"], "cpu", "float32", job["mode"])
    trainer = adapter.build(network, weights, *common)
    pool = {"shape": network["input_shape"], "classes": network["classes"], "batch": job["batch"]}
    pool["seed"] = job["seed"] + number
    if network["vocabulary"]:
        return trainer, worker.Tokens(vocabulary=network["vocabulary"], **pool)
    return trainer, worker.Images(channels_last=adapter.CHANNELS_LAST, **pool)


def sent_bytes(interface):
    """Bytes that the interface has sent, headers included; the list is of this process' own namespace."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise ValueError("interface %r: is not there" % interface)


def counted(interface, engine):
    """The interface's counter when no rank is sending."""
    engine.barrier()
    if interface is None:
        return None
    time.sleep(0.05)
    count = sent_bytes(interface)
    time.sleep(0.05)
    engine.barrier()
    return count


def timed_step(engine, covariates):
    """One step and what else happened during it."""
    switches, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.process_time()
    delay, steal = covariates.run_delay_s(), covariates.steal_s()
    step = dict(dict.fromkeys(STAMPS), **engine.step())
    step["cpu_s"] = time.process_time() - cpu
    step["run_delay_s"] = (covariates.run_delay_s() or 0.0) - (delay or 0.0)
    step["steal_s"] = (covariates.steal_s() or 0.0) - (steal or 0.0)
    step["involuntary_switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    step["load_1min"] = os.getloadavg()[0]
    return step


def work(job, make, version):
    """Train as told and answer. `make(job, worker)` is (this worker's number, its engine)."""
    worker = loaded("worker", job["worker"])
    start_s = time.monotonic()
    number, engine = make(job, worker)
    build_s = time.monotonic() - start_s
    covariates, steps, before = worker.Covariates(), [], None
    for step in range(job["warmups"] + job["steps"]):
        if step == job["warmups"]:
            before = counted(job["interface"], engine)
        steps.append(timed_step(engine, covariates))
        if job["save"]:
            np.savez(os.path.join(job["save"], "gradients-%d-rank%d.npz" % (step, number)), **engine.averaged())
    after = counted(job["interface"], engine)
    answer = {
        "build_s": build_s,
        "steps": steps,
        "sent_bytes": None if after is None else after - before,
        "exchanges": [],
        "losses": engine.losses,
        "parameters": engine.parameters,
        "versions": {"framework": version, "python": platform.python_version()},
        "peak_memory_bytes": worker.process_peak_bytes(),
    }
    if FOLDER in os.environ:
        write_text("%d.json" % number, json.dumps(answer))
    else:
        print(json.dumps(answer), flush=True)
        say_step(number, answer)


def say_step(number, answer):
    """One line for people on stderr; what a launcher of ours reads is on stdout."""
    if "steps" in answer:
        times = sorted(step["end_s"] - step["start_s"] for step in answer["steps"])
        middle = 1e3 * times[len(times) // 2]
        sys.stderr.write("rank %d: %.4g ms a step (median of %d with warm-ups)\n" % (number, middle, len(times)))
        sys.stderr.flush()


def write_text(name, text):
    """A file in the folder of answers, whole or not there."""
    path = os.path.join(os.environ[FOLDER], name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)


def run(main, at_once=True):
    """Run the program and end, without waiting for any thread unless `at_once` is false; after a failure always, so
    that the launcher learns of it immediately. Where mpirun mixes what its ranks say, the reason is a file, too."""
    status = 0
    try:
        main()
    except BaseException as error:
        traceback.print_exc()
        if FOLDER in os.environ:
            write_text("%s.failed" % os.environ.get("OMPI_COMM_WORLD_RANK"), "%s: %s" % (type(error).__name__, error))
        status = 1
    if at_once or status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
