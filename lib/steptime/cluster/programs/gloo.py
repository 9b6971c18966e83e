"""How the programs of torch.distributed with gloo meet. Standard library and torch only.

They are started like a program of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; STEPTIME_LISTENING, if set, is
the open socket at that port, which rank 0 serves. What to do is JSON in the file named as the argument, or on stdin.
"""

import os
from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=300)


def join():
    """Meet the other ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    handle = os.environ.get("STEPTIME_LISTENING")
    if handle is None:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    else:
        own = int(handle) if rank == 0 else None
        store = dist.TCPStore(address, port, world, rank == 0, TIMEOUT, master_listen_fd=own)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return rank
