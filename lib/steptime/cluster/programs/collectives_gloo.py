"""One rank of a benchmark of collectives by torch.distributed with gloo. Standard library and torch only.

Started as gloo.py says. The job: cases (lists of operation and bytes, in the order in which they are timed), warmups,
repeats, budget_s (of a case, decided by rank 0; at least three repetitions are timed). The answer is JSON: for each
case the moments (begin, end) of the timed repetitions, by a clock that the ranks of a machine share. Bytes are those of
a rank's whole buffer of float32: what it reduces, broadcasts, scatters, sends to all, or has after gathering.
"""

import json
import time

import gloo
import ranks
import torch
import torch.distributed as dist

FEWEST = 3


def operation(name, values, workers):
    """The collective as a function without arguments."""
    whole, part = torch.ones(values), torch.ones(values // workers)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[name]


def timed(call, job):
    """[(begin, end)] of the repetitions; each begins when all ranks are there."""
    for _ in range(job["warmups"]):
        call()
    moments, start_s, more = [], time.monotonic(), torch.ones(1)
    while more.item():
        dist.barrier()
        begin_s = time.monotonic()
        call()
        moments.append((begin_s, time.monotonic()))
        if len(moments) >= FEWEST:
            spent = time.monotonic() - start_s > job["budget_s"]
            more.fill_(float(not spent and len(moments) < job["repeats"]))
            dist.broadcast(more, 0)
    return moments


def main():
    job = ranks.told()
    torch.set_num_threads(1)
    gloo.join()
    workers = dist.get_world_size()
    answer = [timed(operation(name, size // 4, workers), job) for name, size in job["cases"]]
    print(json.dumps({"version": torch.__version__, "moments": answer}))


if __name__ == "__main__":
    ranks.run(main)
