"""The images of worker.py as JPEG files, decoded in the step or by loader processes that read ahead.

Run as `python jpegs.py OPTIONS` it is one loader. Standard library, numpy and Pillow only; Python >= 3.6.
"""

import collections
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
from PIL import Image
from worker import OFFSET, SCALE, die_with

QUALITY = 90
COMPLETE = "complete"
"""The file of a folder that is written last."""
READ_AHEAD = 2
"""Batches that each loader decodes beyond the one in use, as torch's DataLoader does by default."""


def path_of(folder, number):
    return os.path.join(folder, "%05d.jpg" % number)


def folder_of_files(images, scratch):
    """The folder under `scratch` with uint8 (count, height, width, channels) images as JPEG files.

    Written at the first call, named by the pixels: so every framework of a machine reads the very same files. A folder
    whose files are no longer those that were written is made anew.
    """
    digest = hashlib.sha256(images.tobytes()).hexdigest()[:12]
    name = "%s-q%d-%s" % ("x".join(map(str, images.shape)), QUALITY, digest)
    folder = os.path.join(scratch, name)
    os.makedirs(scratch, exist_ok=True)
    # Held by one child at a time; it goes with the child, however that ends.
    with open(os.path.join(scratch, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(folder, len(images)):
            aside = folder + ".part"
            for left in (aside, folder):
                if os.path.isdir(left):
                    shutil.rmtree(left)
            os.mkdir(aside)
            write_files(images, aside)
            os.rename(aside, folder)
    return folder


def write_files(images, folder):
    """The images' files, and last the one that says that they are whole: a hash of them all."""
    for number, image in enumerate(images):
        pixels = image[:, :, 0] if image.shape[2] == 1 else image
        Image.fromarray(np.ascontiguousarray(pixels)).save(path_of(folder, number), quality=QUALITY)
    with open(os.path.join(folder, COMPLETE), "w") as file:
        file.write(hash_of_files(folder, len(images)))


def is_whole(folder, count):
    """Does the folder hold `count` files, the very ones that were written?"""
    try:
        with open(os.path.join(folder, COMPLETE)) as file:
            return file.read() == hash_of_files(folder, count)
    except (OSError, UnicodeDecodeError):
        return False


def hash_of_files(folder, count):
    digest = hashlib.sha256()
    for number in range(count):
        with open(path_of(folder, number), "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def decode(path, out, channels_last):
    """Write one file's pixels into `out`, scaled as every input is."""
    with Image.open(path) as image:
        pixels = np.asarray(image)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    out[...] = pixels if channels_last else pixels.transpose(2, 0, 1)
    out -= OFFSET
    out *= SCALE


class Decoded(object):
    """Batches decoded when they are asked for. `pool` gives the order, the labels and the images of the files."""

    def __init__(self, pool, scratch):
        self.channels_last = pool.channels_last
        self.shape = (pool.batch,) + pool.images.shape[1:]
        images = pool.images if self.channels_last else pool.images.transpose(0, 2, 3, 1)
        self.folder = folder_of_files(images, scratch)
        # In memory they would only be counted as the step's.
        pool.images = None
        self.labels, self.chosen = pool.labels, pool.chosen

    def read(self):
        return self._decoded(self.chosen())

    def first(self):
        return self._decoded(np.arange(self.shape[0]))

    def settle(self):
        """Nothing is read ahead."""

    def close(self):
        """Nothing to end."""

    def _decoded(self, chosen):
        images = np.empty(self.shape, np.float32)
        for number, out in zip(chosen, images):
            decode(path_of(self.folder, number), out, self.channels_last)
        return images, self.labels[chosen]


class Loaded(object):
    """The batches of a Decoded, in the same order, by loader processes into memory shared with them.

    Batch k is loader k's (modulo `loaders`). A loader is a fresh interpreter: a fork of a process whose framework has
    threads can hang. It dies with this process. A batch stays as it is until the next one is read.
    """

    def __init__(self, decoded, loaders):
        self._decoded = decoded
        slots = READ_AHEAD * loaders + 1
        shape = (slots,) + decoded.shape
        memory = shared_memory(4 * int(np.prod(shape)))
        self._batches = mapped(memory, shape)
        options = {"folder": decoded.folder, "memory": memory, "shape": shape, "parent": os.getpid()}
        options["channels_last"] = decoded.channels_last
        command = [sys.executable, os.path.abspath(__file__), json.dumps(options)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._loaders = [subprocess.Popen(command, pass_fds=(memory,), **pipes) for _ in range(loaders)]
        os.close(memory)
        self._turn = 0
        self._free = list(range(slots))
        self._waiting = collections.deque()
        self._ready = 0
        self._taken = None
        for _ in range(READ_AHEAD * loaders):
            self._ask()

    def read(self):
        if self._taken is not None:
            self._free.append(self._taken)
        if not self._ready:
            self._await_next()
        self._ready -= 1
        _, self._taken, chosen = self._waiting.popleft()
        self._ask()
        return self._batches[self._taken], self._decoded.labels[chosen]

    def first(self):
        return self._decoded.first()

    def settle(self):
        """Wait until the loaders have read as far ahead as they may."""
        while self._ready < len(self._waiting):
            self._await_next()

    def close(self):
        for loader in self._loaders:
            loader.kill()
            loader.wait()
            loader.stdin.close()
            loader.stdout.close()

    def _ask(self):
        """Have the loader whose turn it is decode the next batch into a free slot."""
        loader = self._loaders[self._turn % len(self._loaders)]
        slot, chosen = self._free.pop(), self._decoded.chosen()
        self._turn += 1
        self._waiting.append((loader, slot, chosen))
        try:
            loader.stdin.write(json.dumps([slot, chosen.tolist()]).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError("a loader process ended with status %s" % loader.wait()) from None

    def _await_next(self):
        """Wait for the first batch that is not known to be decoded."""
        loader = self._waiting[self._ready][0]
        if not os.read(loader.stdout.fileno(), 1):
            raise RuntimeError("a loader process ended with status %s" % loader.wait())
        self._ready += 1


def shared_memory(size):
    """A file of `size` bytes that lives in memory only, as a file descriptor. os.memfd_create needs Python 3.8."""
    memory = ctypes.CDLL(None, use_errno=True).memfd_create(b"batches", 0)
    if memory < 0:
        raise OSError(ctypes.get_errno(), "no shared memory for the loaders")
    os.ftruncate(memory, size)
    return memory


def mapped(memory, shape):
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(memory, 4 * count), np.float32, count).reshape(shape)


def load():
    """One loader: decodes a batch for each line [slot, numbers of the files] and answers with a byte."""
    options = json.loads(sys.argv[1])
    die_with(options["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    batches = mapped(options["memory"], options["shape"])
    for line in iter(sys.stdin.readline, ""):
        slot, chosen = json.loads(line)
        for number, out in zip(chosen, batches[slot]):
            decode(path_of(options["folder"], number), out, options["channels_last"])
        os.write(1, b".")


if __name__ == "__main__":
    load()
