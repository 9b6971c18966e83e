"""A GPT-like model trained with data, tensor and pipeline parallelism: what a step computes, sends and waits for.

Closed forms; every field may be a number or an array of one common length. Sources: parameters, operations and the
bubble of a pipeline: Narayanan et al., arXiv 2104.04473 (equations 2 and 3, section 2.2); tensor parallelism: Shoeybi
et al., arXiv 1909.08053; sharded optimizers: Rajbhandari et al., arXiv 1910.02054 (section 7); GPipe: Huang et al.,
arXiv 1811.06965; recomputation: Korthikanti et al., arXiv 2205.05198.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Number = Any
"""A number or an array of them."""
HALF = 2
"""Bytes of a value in half precision."""
SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Transformer:
    """A GPT-like model: layers of width `hidden` with `heads` heads, over `sequence` tokens of a `vocabulary`."""

    layers: Number
    hidden: Number
    heads: Number
    sequence: Number
    vocabulary: Number = 51_200

    @property
    def layer_parameters(self) -> Number:
        """Of one layer: 12 h^2 + 13 h."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> Number:
        """Of the word and position embeddings: (V + s) h."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> Number:
        """All: equation 2 of arXiv 2104.04473."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def forward_flops(self, samples: Number) -> Number:
        """Operations of a forward pass: layers, attention and logits; backward takes twice as many."""
        tokens, h = samples * self.sequence, self.hidden
        return tokens * (self.layers * (24 * h**2 + 4 * self.sequence * h) + 2 * h * self.vocabulary)

    def step_flops(self, samples: Number, recompute: Number = "none") -> Number:
        """Operations of a step. Full recomputation runs the layers forward once more: equation 3 of arXiv 2104.04473;
        selective: only the products of queries, keys and values."""
        attention = 4 * samples * self.sequence**2 * self.hidden * self.layers
        layers = self.forward_flops(samples) - 2 * samples * self.sequence * self.hidden * self.vocabulary
        again = np.where(is_kind(recompute, "full"), layers, np.where(is_kind(recompute, "selective"), attention, 0.0))
        return 3 * self.forward_flops(samples) + again


@dataclass(frozen=True)
class Plan:
    """How a step is laid out.

    data, tensor, pipeline: parallel sizes, whose product is the number of GPUs. micro_batch: samples of one forward
    pass; micro_batches: how many of them each pipeline runs in a step (gradient accumulation). chunks: stages a GPU
    holds with the interleaved schedule. recompute: of RECOMPUTE. sequence_parallel: as in arXiv 2205.05198.
    """

    micro_batch: Number = 1
    micro_batches: Number = 1
    data: Number = 1
    tensor: Number = 1
    pipeline: Number = 1
    schedule: Number = "1f1b"
    chunks: Number = 1
    zero_stage: Number = 0
    recompute: Number = "none"
    sequence_parallel: Number = False

    @property
    def gpus(self) -> Number:
        return self.data * self.tensor * self.pipeline

    @property
    def samples(self) -> Number:
        """Of all pipelines in a step: the global batch."""
        return self.micro_batch * self.micro_batches * self.data


@dataclass(frozen=True)
class Rates:
    """What the machine gives: seconds of a thing are its operations or bytes over these, plus these latencies.

    flops_per_s: large matrix products; narrow: one whose sides have this geometric mean takes twice as long;
    attention_flops_per_s: products of queries, keys and values. memory_bytes_per_s; layer_passes, softmax_passes: how
    often a kept activation byte of a layer, or of its attention, is read or written in a step; vocabulary_bytes: the
    same for one logit, in bytes; update_passes: for one parameter, in bytes. launch_s: host seconds to start the
    kernels of a layer, forward and backward; split_launch_s, unfused_launch_s: more of it with tensor parallelism, or
    without the fused softmax; head_launch_s: for embedding, logits and loss. overlap, split_overlap: of host and
    device (see `longer`) without and with tensor parallelism, whose all-reduces make the hosts wait for each other.
    tensor_bytes_per_s, tensor_latency_s: all-reduce inside a node, latency of each of its 2 (t - 1) rounds;
    gpu_bytes_per_s: other traffic of a GPU inside its node; node_bytes_per_s: a node's adapters, all together;
    latency_s: of a message. step_s: what a step costs beside. head_slowdown: of the logits' products without tensor
    parallelism (found in measurements; where it comes from is not known).
    """

    flops_per_s: Number
    narrow: Number
    attention_flops_per_s: Number
    memory_bytes_per_s: Number
    layer_passes: Number
    softmax_passes: Number
    vocabulary_bytes: Number
    launch_s: Number
    split_launch_s: Number
    unfused_launch_s: Number
    head_launch_s: Number
    tensor_bytes_per_s: Number
    tensor_latency_s: Number
    gpu_bytes_per_s: Number
    node_bytes_per_s: Number
    latency_s: Number
    update_passes: Number
    step_s: Number
    head_slowdown: Number
    overlap: Number
    split_overlap: Number


@dataclass(frozen=True)
class Step:
    """Seconds of a step and its parts. layer_s, head_s: one layer, and what only the last stage does, of one micro
    batch, forward and backward. The parts add up to total_s: compute_s, tensor_s (what its all-reduces add), send_s
    (between stages), bubble_s (waiting for other stages), data_s (gradients), update_s."""

    layer_s: Number
    head_s: Number
    compute_s: Number
    tensor_s: Number
    send_s: Number
    bubble_s: Number
    data_s: Number
    update_s: Number

    @property
    def total_s(self) -> Number:
        return self.compute_s + self.tensor_s + self.send_s + self.bubble_s + self.data_s + self.update_s


GPUS_PER_NODE = 8
FUSED_ROWS = 4
"""Megatron's fused softmax works on four matrices at a time; other counts fall back to separate kernels."""
HEAD_OVERLAP = 6.0
"""Exponent of `longer` for what is not a layer."""


def is_kind(values: Number, kind: str) -> np.ndarray:
    return np.asarray(values) == kind


def bubble_fraction(pipeline: Number, micro_batches: Number, chunks: Number = 1) -> Number:
    """Idle over useful time of a pipeline of equal stages: (p - 1) / (m v); section 2.2 of arXiv 2104.04473."""
    return (pipeline - 1) / (micro_batches * chunks)


def in_flight(
    schedule: Number, pipeline: Number, micro_batches: Number, stage: Number = 0, chunks: Number = 1
) -> Number:
    """Micro batches whose activations stage number `stage` (from 0) keeps at one time, in units of its layers.

    GPipe: all; 1F1B: at most as many as stages from here to the end; interleaved: (1 + (p - 1) / (p v)) times the
    first stage's (section 4.2.3 of arXiv 2205.05198).
    """
    one = np.minimum(pipeline - stage, micro_batches)
    interleaved = np.minimum(one * (1 + (pipeline - 1) / (pipeline * chunks)), micro_batches)
    kinds = [is_kind(schedule, "gpipe"), is_kind(schedule, "interleaved")]
    return np.select(kinds, [micro_batches + 0 * one, interleaved], one)


def data_parallel_values(parameters: Number, data: Number, zero_stage: Number, micro_batches: Number = 1) -> Number:
    """Values that a GPU sends (and receives) in a step because its parameters are on `data` GPUs.

    Times (d - 1) / d, for a parameter: stages 0 and 1 reduce-scatter gradients and all-gather values once, 2. Sharded
    gradients are reduced for each micro batch, m + 1; sharded values are gathered for each forward and each backward,
    3 m. With one micro batch 2, 2, 2, 3: section 7 of arXiv 1910.02054.
    """
    stage, m = np.asarray(zero_stage), micro_batches
    a_parameter = np.select([stage == 3, stage == 2], [3 * m + 0 * stage, m + 1 + 0 * stage], 2 + 0 * stage)
    return a_parameter * parameters * (data - 1) / data


def tensor_bytes(model: Transformer, plan: Plan) -> Number:
    """Bytes that one GPU sends for the tensor parallelism of a layer and a micro batch: two all-reduces forward, two
    backward, two more where forward is run again; each of 2 (t - 1) / t times the layer's output in half precision."""
    output = HALF * plan.micro_batch * model.sequence * model.hidden
    return all_reduces(plan) * 2 * (plan.tensor - 1) / plan.tensor * output


def all_reduces(plan: Plan) -> Number:
    """Of a layer and a micro batch, forward and backward, with tensor parallelism (arXiv 1909.08053, section 3)."""
    return np.where(is_kind(plan.recompute, "full"), 6, 4)


def layer_parts(model: Transformer, plan: Plan, rates: Rates) -> tuple[Number, Number, Number]:
    """Seconds of a layer and a micro batch, forward and backward: on the device, in all-reduces, of the host."""
    t, h, tokens = plan.tensor, model.hidden, plan.micro_batch * model.sequence
    forward = 24 * tokens * h**2 / t / rates.flops_per_s * (1 + rates.narrow * np.sqrt(t) / h)
    attention = 4 * tokens * model.sequence * h / t / rates.attention_flops_per_s
    kept = tokens * h * np.where(plan.sequence_parallel, 34 / t, 10 + 24 / t)
    softmax = 5 * model.heads * model.sequence * tokens / t * rates.softmax_passes / rates.memory_bytes_per_s
    passes = kept * rates.layer_passes / rates.memory_bytes_per_s
    full, selective = is_kind(plan.recompute, "full"), is_kind(plan.recompute, "selective")
    again_core = np.where(full | selective, 1.0, 0.0)
    again = np.where(full, 1.0, 0.0)
    # Forward is a third of the passes over kept bytes as it is of the operations.
    device = (3 + again) * (forward + passes / 3) + (3 + again_core) * (attention + softmax / 3)
    outside = t > GPUS_PER_NODE
    wire = tensor_bytes(model, plan) / np.where(outside, rates.node_bytes_per_s, rates.tensor_bytes_per_s)
    split = np.where(t > 1, wire + all_reduces(plan) * 2 * (t - 1) * rates.tensor_latency_s, 0.0)
    unfused = np.mod(plan.micro_batch * model.heads / t, FUSED_ROWS) != 0
    host = rates.launch_s + np.where(t > 1, rates.split_launch_s, 0) + unfused * rates.unfused_launch_s
    return device, split, host * (1 + again / 3)


def predict(model: Transformer, plan: Plan, rates: Rates, layer: Number = 1.0, head: Number = 1.0) -> Step:
    """The step's time: m times the last stage, which has the logits beside its layers, and the other stages once,
    divided by the chunks; then gradients and update. `layer`, `head`: factors of a layer's and the logits' time."""
    t, p, m = plan.tensor, plan.pipeline, plan.micro_batches
    device, split, host = layer_parts(model, plan, rates)
    sharp = np.where(t > 1, rates.split_overlap, rates.overlap)
    together = longer(device + split, host, sharp) * layer
    alone = np.minimum(longer(device, host, rates.overlap) * layer, together)
    here = np.ceil(model.layers / p)
    head_s = head_seconds(model, plan, rates) * head
    send = send_seconds(model, plan, rates)
    others = (p - 1) * (here * together + send) / plan.chunks
    parameters = here * model.layer_parameters / t + model.embedding_parameters / t
    return Step(
        layer_s=together,
        head_s=head_s,
        compute_s=m * (here * alone + head_s),
        tensor_s=m * here * (together - alone),
        send_s=m * send,
        bubble_s=others,
        data_s=data_seconds(parameters, model, plan, rates),
        update_s=update_seconds(parameters, plan, rates),
    )


def longer(one: Number, other: Number, overlap: Number) -> Number:
    """Seconds of two that run side by side: their sum where overlap is 1, the longer one where it is large."""
    most = np.maximum(one, other)
    return most * (1 + (np.minimum(one, other) / most) ** overlap) ** (1 / overlap)


def head_seconds(model: Transformer, plan: Plan, rates: Rates) -> Number:
    """Logits and loss of a micro batch, forward and backward, and the embedding's part."""
    t, tokens = plan.tensor, plan.micro_batch * model.sequence
    slowdown = np.where(t == 1, rates.head_slowdown, 1.0)
    products = 6 * tokens * model.hidden * model.vocabulary / t / rates.flops_per_s * slowdown
    logits = tokens * model.vocabulary / t * rates.vocabulary_bytes / rates.memory_bytes_per_s
    return longer(products + logits, rates.head_launch_s, HEAD_OVERLAP)


def send_seconds(model: Transformer, plan: Plan, rates: Rates) -> Number:
    """Activations to the next stage and gradients back, one micro batch. Each GPU of a tensor group sends its share to
    another node, where the group gathers it (arXiv 2104.04473, section 4.1); a node's groups share its adapters."""
    n_bytes = HALF * plan.micro_batch * model.sequence * model.hidden
    groups = np.minimum(GPUS_PER_NODE / plan.tensor, plan.data)
    between = np.where(_several_nodes(plan), groups * n_bytes / rates.node_bytes_per_s, 0.0)
    wire = between + n_bytes / rates.gpu_bytes_per_s
    return np.where(plan.pipeline > 1, 2 * (wire + rates.latency_s) * plan.chunks, 0.0)


def data_seconds(parameters: Number, model: Transformer, plan: Plan, rates: Rates) -> Number:
    """Gradients in half precision over the data-parallel GPUs, none of it hidden by backward passes.

    GPUs of a tensor group are neighbours, then those of a data group: a node's other rings share its adapters. First
    and last stage share the embedding's gradient.
    """
    inside = np.clip(GPUS_PER_NODE // plan.tensor, 1, plan.data)
    sent = HALF * data_parallel_values(parameters, plan.data, plan.zero_stage, plan.micro_batches)
    rings = GPUS_PER_NODE / inside
    wire = np.where(plan.data > inside, sent * rings / rates.node_bytes_per_s, sent / rates.gpu_bytes_per_s)
    rounds = 2 * (plan.data - 1) * rates.latency_s
    tied = HALF * model.vocabulary * model.hidden / plan.tensor
    senders = np.minimum(GPUS_PER_NODE, plan.tensor * plan.data)
    shared = np.where(_several_nodes(plan), senders * tied / rates.node_bytes_per_s, tied / rates.gpu_bytes_per_s)
    return np.where(plan.data > 1, wire + rounds, 0.0) + np.where(plan.pipeline > 1, shared, 0.0)


def _several_nodes(plan: Plan) -> Any:
    return plan.gpus > GPUS_PER_NODE


def update_seconds(parameters: Number, plan: Plan, rates: Rates) -> Number:
    """The optimizer's passes over its part of the parameters, and what a step costs beside."""
    own = parameters / np.where(plan.zero_stage > 0, plan.data, 1)
    return own * rates.update_passes / rates.memory_bytes_per_s + rates.step_s
