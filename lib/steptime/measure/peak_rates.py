"""What the processor reaches on the two simplest loads: a large matrix product and a large copy."""

import json
import os
import subprocess
import sys
from typing import Any

from steptime.core.errors import InputError
from steptime.measure.lock import measuring_lock
from steptime.measure.provenance import cores_allowed

MATRIX_ORDER = 1536
COPY_BYTES = 2**28
"""256 MiB are copied at a time, many times what any cache of today holds."""

# Runs in a fresh interpreter: a BLAS reads its number of threads when it is loaded. numpy's copy is of one thread, so
# each thread copies its own slice; the copy lets go of the interpreter lock.
_PROGRAM = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np

order, size, threads, seconds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
rng = np.random.default_rng(0)
a, b = rng.random((2, order, order), dtype=np.float32)
c = np.empty_like(a)
source = np.ones(size // 4, dtype=np.float32)
target = np.zeros_like(source)
slices = [slice(k * source.size // threads, (k + 1) * source.size // threads) for k in range(threads)]

def copy(part):
    np.copyto(target[part], source[part])

def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

with ThreadPoolExecutor(threads) as pool:
    loads = (lambda: np.matmul(a, b, out=c), lambda: list(pool.map(copy, slices)))
    for load in loads:
        load()
    rounds, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(rounds) < 5:
        rounds.append([timed(load) for load in loads])
reads = np.diff([time.perf_counter() for _ in range(100000)])
matmul_s, copy_s = np.median(rounds, axis=0)
print(json.dumps({
    "peak_flops_per_s": 2 * order ** 3 / matmul_s,
    "memory_bytes_per_s": 2 * source.nbytes / copy_s,
    "timer_resolution_s": float(reads[reads > 0].min()),
    "rounds": len(rounds),
}))
"""


def check_peaks(threads: int, seconds: float, source: str) -> None:
    """Raise InputError for threads that the machine does not have and seconds that take forever or none."""
    if not 1 <= threads <= cores_allowed():
        raise InputError(f"{source}: threads = {threads}: must be 1 to {cores_allowed()}, the cores allowed here")
    if not 0 < seconds <= 3600:
        raise InputError(f"{source}: seconds = {seconds}: must be above 0 and at most 3600")


def peaks(threads: int = 1, seconds: float = 2.0) -> dict[str, Any]:
    """Medians over rounds that alternate both loads for `seconds`, at least five, after one of each to warm up.

    `peak_flops_per_s`: float32 product of two square matrices of MATRIX_ORDER, 2 n^3 operations. `memory_bytes_per_s`:
    copy of COPY_BYTES, counted twice (read and written) as STREAM counts. `timer_resolution_s`: least difference of two
    reads of the clock. Raises InputError for a bad argument and when another process is measuring.
    """
    check_peaks(threads, seconds, "peaks")
    limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "OPENBLAS", "MKL", "BLIS")}
    command = [sys.executable, "-c", _PROGRAM, str(MATRIX_ORDER), str(COPY_BYTES), str(threads), str(seconds)]
    with measuring_lock():
        done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout), "threads": threads, "matrix_order": MATRIX_ORDER, "copy_bytes": COPY_BYTES}
