"""A process that takes a core in windows drawn from a seed, and says when: `python hog.py CORE SEED PARENT`.

Pinned to CORE it writes "ready", then sleeps and spins in turn, each for 0.4 to 1.2 s, and writes "start end" (seconds
of time.perf_counter, which all processes of a Linux machine share) after each spin. It ends with PARENT, or on SIGTERM.
"""

import os
import random
import sys
import time


def main(core: int, seed: int, parent: int) -> None:
    """Take the core in turns until the parent is gone."""
    os.sched_setaffinity(0, {core})
    drawn = random.Random(seed)
    print("ready", flush=True)
    while os.getppid() == parent:
        time.sleep(drawn.uniform(0.4, 1.2))
        length_s = drawn.uniform(0.4, 1.2)
        start = now = time.perf_counter()
        while now < start + length_s:
            now = time.perf_counter()
        print(start, now, flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
