"""Peak memory of a GPU that trains a GPT-like model with data, tensor and pipeline parallelism, in bytes.

By description alone, nothing fitted: parameters, gradients and optimizer as sharded by ZeRO (Rajbhandari et al., arXiv
1910.02054, section 5), activations (Korthikanti et al., arXiv 2205.05198, sections 4 and 5). What a framework needs
beside is not in it; `model.memory` fits that to measured peaks of one device.
"""

from dataclasses import dataclass

import numpy as np

from steptime.model.parallelism import Number, Plan, Transformer, in_flight, is_kind


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter: its value, its gradient, and what the optimizer keeps."""

    value: int
    gradient: int
    optimizer: int


MIXED = Precision(2, 2, 12)
"""Half precision with Adam: a copy in float32 and two moments."""
SINGLE = Precision(4, 4, 8)


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that has most: values, gradients, optimizer, activations of layers and outside of layers."""

    values: Number
    gradients: Number
    optimizer: Number
    layers: Number
    outside: Number

    @property
    def states(self) -> Number:
        return self.values + self.gradients + self.optimizer

    @property
    def total(self) -> Number:
        return self.states + self.layers + self.outside


def model_states(
    parameters: Number, data: Number, zero_stage: Number, precision: Precision = MIXED
) -> tuple[Number, Number, Number]:
    """Bytes of values, gradients and optimizer of `parameters` on each of `data` GPUs.

    Stage 1 shards the optimizer, 2 the gradients too, 3 the values too.
    """
    stage = np.asarray(zero_stage)
    first, second, third = (parameters / np.where(stage >= least, data, 1) for least in (3, 2, 1))
    return precision.value * first, precision.gradient * second, precision.optimizer * third


def layer_activations(model: Transformer, plan: Plan) -> Number:
    """Bytes that a layer keeps of one micro batch for its backward pass (table 2 of arXiv 2205.05198)."""
    unit = plan.micro_batch * model.sequence * model.hidden
    t = plan.tensor
    attention = 5 * model.heads * model.sequence / model.hidden / t
    rest = np.where(plan.sequence_parallel, 34 / t, 10 + 24 / t)
    kinds = [is_kind(plan.recompute, "full"), is_kind(plan.recompute, "selective")]
    return unit * np.select(kinds, [2.0 + 0 * rest, rest], rest + attention)


def running_layer(model: Transformer, plan: Plan) -> Number:
    """Bytes of the one layer that is being run again, where layers are recomputed in full."""
    everything = Plan(micro_batch=plan.micro_batch, tensor=plan.tensor, sequence_parallel=plan.sequence_parallel)
    return np.where(is_kind(plan.recompute, "full"), layer_activations(model, everything), 0.0)


def outside_activations(model: Transformer, plan: Plan) -> Number:
    """Bytes of the first stage's embedding dropout and, with one stage, of the final norm, the logits' input and the
    logits in float32 (section 4.3 of arXiv 2205.05198)."""
    unit = plan.micro_batch * model.sequence
    t, split = plan.tensor, np.where(plan.sequence_parallel, plan.tensor, 1)
    dropout = unit * model.hidden * np.minimum(plan.pipeline, plan.micro_batches) / split
    head = 4 * unit * model.hidden / split + 4 * unit * model.vocabulary / t
    return dropout + np.where(np.asarray(plan.pipeline) == 1, head, 0.0)


def peak_memory(model: Transformer, plan: Plan, precision: Precision = MIXED) -> Memory:
    """Of the first stage, which keeps the activations of most micro batches."""
    here = np.ceil(model.layers / plan.pipeline)
    parameters = (here * model.layer_parameters + model.embedding_parameters) / plan.tensor
    kept = in_flight(plan.schedule, plan.pipeline, plan.micro_batches, chunks=plan.chunks)
    layers = here * kept * layer_activations(model, plan) + running_layer(model, plan)
    states = model_states(parameters, plan.data, plan.zero_stage, precision)
    return Memory(*states, layers, outside_activations(model, plan))
