"""Traces of made-up steps whose breakdown, critical path and clocks are known, in the form that Kineto writes."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

BASE_NS = 1_700_000_000_000_000_000


@dataclass
class Recording:
    """Events of one rank; times in milliseconds, written in microseconds, its clock `skew_ms` ahead."""

    rank: int = 0
    world_size: int = 1
    skew_ms: float = 0.0
    events: list[dict] = field(default_factory=list)

    def add(self, category, name, start, end, tid=1, pid=100, **args):
        about = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args}
        times = {"ts": (start + self.skew_ms) * 1e3, "dur": (end - start) * 1e3}
        self.events.append(about | times)
        return self

    def arrow(self, number, forward, backward, tid=1):
        for phase, time in (("s", forward), ("f", backward)):
            place = {"pid": 100, "tid": tid, "ts": (time + self.skew_ms) * 1e3}
            self.events.append({"ph": phase, "id": number, "cat": "fwdbwd", "name": "fwdbwd", **place})
        return self

    def step(self, number, start, end):
        return self.add("user_annotation", f"ProfilerStep#{number}", start, end)

    def op(self, name, start, end, **args):
        return self.add("cpu_op", name, start, end, **args)

    def gloo(self, start, end, elements, tid=2):
        about = {"Input Dims": [[elements]], "Input type": ["float"]}
        return self.add("user_annotation", "gloo:all_reduce", start, end, tid=tid, **about)

    def kernel(self, name, launch, start, end, correlation, stream=7, **args):
        self.add("cuda_runtime", "cudaLaunchKernel", launch, launch + 0.01, correlation=correlation)
        return self.add("kernel", name, start, end, tid=stream, pid=0, correlation=correlation, stream=stream, **args)

    def content(self):
        info = {"backend": "gloo", "rank": self.rank, "world_size": self.world_size}
        names = [{"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": "python"}}]
        return {
            "schemaVersion": 1,
            "distributedInfo": info,
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": names + self.events,
        }

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content(), indent=1)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def two_ranks(folder: Path, skew_ms: float = 0.0) -> list[Path]:
    """Two hosts, one step of 20 ms: forward, backward in two halves, an all-reduce after each, the update.

    Rank 1's second half takes 4 ms longer, so rank 0 waits from 11 to 17 ms: 4 for rank 1, 2 for the message.
    Rank:             0                     1
    input           0 - 1                 0 - 1
    forward         1 - 4                 1 - 4
    backward one    4 - 7                 4 - 7
    all-reduce one  7 - 9  (1 MB)         7 - 9
    backward two    7 - 11                7 - 15
    all-reduce two 11 - 17 (4 MB)        15 - 17
    update         17 - 19               17 - 19
    """
    paths = []
    for rank, late in ((0, 11), (1, 15)):
        recording = Recording(rank, 2, skew_ms * rank)
        recording.step(3, 0, 20).add("user_annotation", "input", 0, 1)
        recording.op("aten::randn", 0.2, 0.8).op("aten::linear", 1, 4)
        recording.op("autograd::engine::evaluate_function: AddmmBackward0", 4, 7)
        recording.gloo(7, 9, 250_000)
        recording.op("autograd::engine::evaluate_function: ConvolutionBackward0", 7, late)
        recording.gloo(late, 17, 1_000_000, tid=3)
        recording.add("user_annotation", "Optimizer.step#SGD.step", 17, 19).op("aten::add_", 17, 19)
        paths.append(recording.write(folder / f"rank{rank}.json.gz"))
    return paths
