"""How the ranks' gradients become one: what is done with each group of layers, in the groups' order, on one thread.

A job's "synchronisation" is {"exchange": a key of EXCHANGES, "groups": lists of layer numbers in sending order,
"after_backward": whether groups wait for the whole backward pass, ...the exchange's own options}. One group is on the
wire after the other, as the performance models have it; torch's own engine (`Buckets`) does as it likes.
"""

import queue
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Exchange(object):
    """All-reduce of a group as one message. A subclass replaces `exchange`, which ends with the average in `flat`."""

    def __init__(self, training, job, workers):
        self.training, self.options = training, job["synchronisation"]
        self.workers, self.rank = workers, dist.get_rank()
        self.groups = self.options["groups"]
        self.flats = [
            torch.zeros(sum(tensor.numel() for number in group for tensor in training.layers[number].tensors))
            for group in self.groups
        ]
        self.sent_s = []
        """(group, when its exchange began, when it ended) of the last step."""
        self._queue = queue.Queue()
        self._failure = None
        threading.Thread(target=self._serve, daemon=True).start()

    def step(self):
        """One forward and backward pass with the synchronisation; the averages are in the layers' gradients.

        A lone worker's are its own: nothing is packed or sent.
        """
        self.sent_s.clear()
        if self.workers == 1:
            return self.training.step(lambda layer: None)
        self._next, self._made = 0, set()
        stamps = self.training.step(self._ready)
        for number in range(self._next, len(self.groups)):
            self._queue.put(number)
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure
        return stamps

    def after_update(self, step):
        """Called when the weights have changed."""

    def _ready(self, layer):
        """Hand over each group whose layers' gradients all exist, none before the groups in front of it."""
        self._made.add(layer)
        while (
            not self.options["after_backward"]
            and self._next < len(self.groups)
            and self._made.issuperset(self.groups[self._next])
        ):
            self._queue.put(self._next)
            self._next += 1

    def _serve(self):
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, int):
                    start_s = time.monotonic()
                    self.send(item)
                    self.sent_s.append((item, start_s, time.monotonic()))
                else:
                    self.complete()
            except Exception as error:
                self._failure = error
            if not isinstance(item, int):
                item.set()

    def send(self, number):
        flat = self.packed(number)
        self.exchange(number, flat)
        self.unpack(number, flat)

    def complete(self):
        """Called after the step's last group."""

    def exchange(self, number, flat):
        dist.all_reduce(flat)
        flat.mul_(1 / self.workers)

    def gradients(self, number):
        return [gradient for layer in self.groups[number] for gradient in self.training.layers[layer].gradients]

    def packed(self, number):
        """The group's gradients as one vector; a lone one as it is, without a copy."""
        gradients = self.gradients(number)
        if len(gradients) == 1 and gradients[0].is_contiguous():
            return gradients[0].view(-1)
        return torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.flats[number])

    def unpack(self, number, flat):
        gradients = self.gradients(number)
        if gradients[0].data_ptr() == flat.data_ptr():
            return
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class Buckets(object):
    """torch's DistributedDataParallel: buckets of "bucket_bytes", two of them on the wire at a time."""

    def __init__(self, training, job, workers):
        self.training, self.sent_s = training, []
        cap_mb = job["synchronisation"]["bucket_bytes"] / 2**20
        self._module = DistributedDataParallel(training.module(), bucket_cap_mb=cap_mb)

    def step(self):
        return self.training.step(lambda layer: None, self._module)

    def after_update(self, step):
        """Nothing."""


class Server(Exchange):
    """Push to parameter servers, pull the averages: each of "servers" ranks behind the workers holds a part of each
    group. Pulls are waited for at the end of backward, so they overlap the pushes of later groups."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._waiting = []

    def send(self, number):
        flat = self.packed(number)
        works = []
        for server, part in shards(flat, self.workers, self.options["servers"]):
            # The reply comes when all has been taken, so that it may take the place of what was sent.
            works += [dist.isend(part, server, tag=2 * number), dist.irecv(part, server, tag=2 * number + 1)]
        self._waiting.append((number, flat, works))

    def complete(self):
        for number, flat, works in self._waiting:
            for work in works:
                work.wait()
            self.unpack(number, flat)
        self._waiting = []


def shards(flat, workers, servers):
    """(rank of the server, its part of the vector), nearly equal parts, empty ones left out."""
    return [(workers + k, part) for k, part in enumerate(flat.tensor_split(servers)) if part.numel()]


def serve(layer_values, job, workers):
    """What a parameter server does for the whole run. `layer_values`: number of values of each learnable layer."""
    options, rank = job["synchronisation"], dist.get_rank()
    sizes = [sum(layer_values[number] for number in group) for group in options["groups"]]
    parts = [dict(shards(torch.zeros(size), workers, options["servers"])).get(rank) for size in sizes]
    buffers = {number: torch.zeros(workers, part.numel()) for number, part in enumerate(parts) if part is not None}
    for _ in range(job["warmups"] + job["steps"]):
        # All are asked for at once: a worker's push begins when its place is ready.
        pushes = {
            number: [dist.irecv(each, worker, tag=2 * number) for worker, each in enumerate(buffer)]
            for number, buffer in buffers.items()
        }
        pulls = []
        for number, buffer in buffers.items():
            for work in pushes[number]:
                work.wait()
            mean = buffer.mean(0)
            pulls += [(mean, dist.isend(mean, worker, tag=2 * number + 1)) for worker in range(workers)]
        for _, work in pulls:
            work.wait()


class Factors(Exchange):
    """Dense layers in "factored" send the two factors of their gradient to all, and each rank rebuilds the mean."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._factored = set(self.options["factored"])
        self.training.keep_factors(self._factored)

    def send(self, number):
        if not self._factored.intersection(self.groups[number]):
            super().send(number)
            return
        (layer,) = (self.training.layers[each] for each in self.groups[number])
        given, taken = layer.factors()
        own = torch.cat([given.reshape(-1), taken.reshape(-1)])
        every = torch.empty(self.workers, own.numel())
        dist.all_gather_into_tensor(every.view(-1), own)
        rows = every.split([given.numel(), taken.numel()], 1)
        layer.rebuild(rows[0].reshape(-1, given.shape[1]), rows[1].reshape(-1, taken.shape[1]), 1 / self.workers)


class Sparse(Exchange):
    """Coarse-grained sparse communication: of each group's chunks of "chunk_values", all ranks send the same share
    1 - "sparsity", those with the largest sum over ranks of their 1-norms; what is not sent waits and is added to the
    next step's gradient (Sun et al., arXiv 1902.06855)."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._kept = [torch.zeros_like(flat) for flat in self.flats]

    def exchange(self, number, flat):
        values, kept = self.options["chunk_values"], self._kept[number]
        flat.add_(kept)
        chunks = flat.split(values)
        norms = torch.stack([chunk.abs().sum() for chunk in chunks])
        dist.all_reduce(norms)
        count = chosen_chunks(len(chunks), self.options["sparsity"])
        chosen = sorted(torch.argsort(norms, descending=True, stable=True)[:count].tolist())
        kept.copy_(flat)
        sent = torch.cat([chunks[each] for each in chosen])
        dist.all_reduce(sent)
        flat.zero_()
        parts = sent.mul_(1 / self.workers).split([chunks[each].numel() for each in chosen])
        for each, part in zip(chosen, parts, strict=True):
            chunks[each].copy_(part)
            kept.split(values)[each].zero_()


def chosen_chunks(count, sparsity):
    """How many of `count` chunks are sent: at least one."""
    return max(1, round((1 - sparsity) * count))


class Hierarchical(Exchange):
    """Summed at the first of each node's "per_node" ranks, summed among those, and broadcast in each node."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        per_node = self.options["per_node"]
        # Every rank takes part in making every group.
        nodes = [dist.new_group(list(range(first, first + per_node))) for first in range(0, self.workers, per_node)]
        self._leaders = dist.new_group(list(range(0, self.workers, per_node)))
        self._node, self._leader = nodes[self.rank // per_node], self.rank // per_node * per_node

    def exchange(self, number, flat):
        dist.reduce(flat, self._leader, group=self._node)
        if self.rank == self._leader:
            dist.all_reduce(flat, group=self._leaders)
        dist.broadcast(flat, self._leader, group=self._node)
        flat.mul_(1 / self.workers)


class Local(Exchange):
    """Local SGD: no gradient travels; after every "period" steps the weights are averaged, as one message."""

    def after_update(self, step):
        if (step + 1) % self.options["period"]:
            return
        tensors = [tensor.detach() for tensor in self.training.weights().values()]
        start_s = time.monotonic()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat.mul_(1 / self.workers)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
        self.sent_s.append((0, start_s, time.monotonic()))


EXCHANGES = {
    "all_reduce": Exchange,
    "buckets": Buckets,
    "server": Server,
    "factors": Factors,
    "sparse": Sparse,
    "hierarchical": Hierarchical,
    "local": Local,
}
