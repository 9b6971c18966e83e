"""Record LeNet's training step on two workers of one machine: torch, DistributedDataParallel, gloo over loopback.

    python data/traces/record_lenet.py FOLDER
    steptime trace add NAME FOLDER/rank0.json.gz FOLDER/rank1.json.gz

One thread a worker, batch 64 of noise made anew in each step, DDP's own buckets. Steps 4 to 13 are recorded.
"""

import os
import subprocess
import sys

BATCH, STEPS, WARMUPS, WORKERS = 64, 10, 3, 2


def train(rank: int, folder: str) -> None:
    import torch
    from torch import distributed, nn
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    lenet = nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )
    model = nn.parallel.DistributedDataParallel(lenet)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    plan = schedule(wait=1, warmup=WARMUPS, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for _ in range(1 + WARMUPS + STEPS):
            with record_function("input"):
                images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(os.path.join(folder, f"rank{rank}.json.gz"))
    distributed.destroy_process_group()


def main(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, folder]
    workers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORKERS)]
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    folder, *rank = sys.argv[1:]
    if rank:
        train(int(rank[0]), os.path.abspath(folder))
    else:
        main(os.path.abspath(folder))
