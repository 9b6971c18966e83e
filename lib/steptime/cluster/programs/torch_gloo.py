"""One rank of a synchronous training run by torch.distributed with gloo. Standard library, numpy and torch only.

Started as gloo.py says. What to do is a JSON list of jobs with equally many workers, done one after the other. A job:

network, batch, seed, learning_rate, threads    what is trained; every rank has the same weights and its own samples
profile                                         or null; replayed instead: layers, input_s, update_s
workers, warmups, steps, synchronisation        of exchanges.py; ranks behind the workers are parameter servers
adapter, worker                                 files of the torch adapter and of worker.py
interface                                       whose bytes are counted, or null
save                                            or null: a folder for gradients and weights, a file a rank

The answer is a JSON list on stdout, times in seconds of a clock that the ranks of a machine share.
"""

import json
import os
import platform
import resource
import sys
import time

import exchanges
import gloo
import numpy as np
import ranks
import torch
import torch.distributed as dist
import training

SAVED_STEPS = 3


def counted(interface, team):
    """The interface's counter when no rank is sending."""
    dist.barrier(group=team)
    if interface is None:
        return None
    time.sleep(0.05)
    count = ranks.sent_bytes(interface)
    time.sleep(0.05)
    dist.barrier(group=team)
    return count


def timed_step(number, made, exchange, covariates, save):
    """One step and what else happened during it."""
    switches, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.process_time()
    delay, steal = covariates.run_delay_s(), covariates.steal_s()
    stamps = exchange.step()
    averaged_s = time.monotonic()
    if save and number < SAVED_STEPS:
        np.savez(save % ("gradients-%d" % number), **made.gradients())
        averaged_s = time.monotonic()
    made.update()
    updated_s = time.monotonic()
    exchange.after_update(number)
    end_s = time.monotonic()
    return {
        "start_s": stamps.start_s,
        "forward_s": stamps.forward_s,
        "backward_s": stamps.backward_s,
        "averaged_s": averaged_s,
        "updated_s": updated_s,
        "end_s": end_s,
        "cpu_s": time.process_time() - cpu,
        "run_delay_s": (covariates.run_delay_s() or 0.0) - (delay or 0.0),
        "steal_s": (covariates.steal_s() or 0.0) - (steal or 0.0),
        "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches,
        "load_1min": os.getloadavg()[0],
    }


def work(job, rank, worker, team):
    """Train; the answer of a worker."""
    start_s = time.monotonic()
    if job["profile"] is None:
        made = training.Computed(ranks.loaded("adapter", job["adapter"]), worker, job, rank)
    else:
        made = training.Emulated(job["profile"], job["batch"])
    exchange = exchanges.EXCHANGES[job["synchronisation"]["exchange"]](made, job, job["workers"])
    build_s = time.monotonic() - start_s
    save = job["save"] and os.path.join(job["save"], "%%s-rank%d.npz" % rank)
    covariates = worker.Covariates()
    steps = [timed_step(number, made, exchange, covariates, save) for number in range(job["warmups"])]
    before = counted(job["interface"], team)
    steps += [timed_step(job["warmups"] + number, made, exchange, covariates, save) for number in range(job["steps"])]
    after = counted(job["interface"], team)
    if save:
        np.savez(save % "weights", **{name: tensor.detach().numpy() for name, tensor in made.weights().items()})
    return {
        "build_s": build_s,
        "steps": steps,
        "sent_bytes": None if after is None else after - before,
        "exchanges": exchange.sent_s,
        "losses": made.losses,
        "parameters": sum(tensor.numel() for layer in made.layers for tensor in layer.tensors),
    }


def serve(job):
    """Be a parameter server; its answer."""
    if job["profile"] is None:
        counts = [
            sum(int(np.prod(each["shape"])) for each in layer["parameters"]) for layer in job["network"]["layers"]
        ]
    else:
        counts = [int(layer["parameter_bytes"]) // 4 for layer in job["profile"]["layers"]]
    exchanges.serve([count for count in counts if count], job, job["workers"])
    return {}


def main():
    jobs = ranks.told()
    torch.set_num_threads(jobs[0]["threads"])
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(1e-4)  # the thread that communicates must not wait 5 ms for the one that computes
    worker = ranks.loaded("worker", jobs[0]["worker"])
    rank, workers = gloo.join(), jobs[0]["workers"]
    team = dist.new_group(list(range(workers)))
    answers = []
    for job in jobs:
        answer = work(job, rank, worker, team) if rank < workers else serve(job)
        answer["versions"] = {"framework": torch.__version__, "python": platform.python_version()}
        answer["peak_memory_bytes"] = worker.process_peak_bytes()
        answers.append(answer)
        dist.barrier()
    print(json.dumps(answers), flush=True)
    ranks.say_step(rank, answers[0])


if __name__ == "__main__":
    ranks.run(main)
