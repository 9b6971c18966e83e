"""A layer profile replayed by waiting, told as torch_gloo.py's jobs have it. Standard library only; Python >= 3.6."""

import ctypes
import time

PR_SET_TIMERSLACK = 29
SPIN_S = 100e-6
"""The last of a wait is spun: sleeping ends late by some tens of microseconds."""


def precise_sleep():
    """Have the kernel wake this process when it is due, not up to 50 microseconds later."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def wait_until(deadline_s):
    """Sleep, then spin shortly: the core is free for the ranks that communicate."""
    left = deadline_s - time.monotonic() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.monotonic() < deadline_s:
        pass


class Replay(object):
    """When a step's passes end. `sizes` are the values of the learnable layers, in forward order.

    Like a device that is given a step's work at once, it does not fall behind by what holds up the host: each layer's
    moment is counted from the step's start.
    """

    def __init__(self, profile):
        precise_sleep()
        self.sizes = []
        self.ends_s = []
        """(seconds from the end of forward to the end of the layer's backward, its number among the learnable)."""
        numbers = {}
        for layer in profile["layers"]:
            if layer["parameter_bytes"]:
                numbers[layer["layer"]] = len(self.sizes)
                self.sizes.append(int(layer["parameter_bytes"]) // 4)
        passed_s = 0.0
        for layer in reversed(profile["layers"]):
            passed_s += layer["backward_s"]
            self.ends_s.append((passed_s, numbers.get(layer["layer"])))
        self.before_s = profile["input_s"] + sum(layer["forward_s"] for layer in profile["layers"])
        self._update_s = profile["update_s"]

    def step(self, ready):
        """Wait as long as a step's passes take, calling `ready(number)` at each learnable layer's moment; stamps."""
        start_s = time.monotonic()
        forward_s = backward_s = start_s + self.before_s
        wait_until(forward_s)
        for passed_s, number in self.ends_s:
            wait_until(forward_s + passed_s)
            backward_s = time.monotonic()
            if number is not None:
                ready(number)
        return {"start_s": start_s, "forward_s": forward_s, "backward_s": backward_s}

    def update(self):
        wait_until(time.monotonic() + self._update_s)
