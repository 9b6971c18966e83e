"""One file a framework, run by `worker.py` in a child process, in that framework's own interpreter.

An adapter uses the standard library, numpy and its framework, and nothing of ours; syntax of Python 3.6. It has

CHANNELS_LAST
    whether `images` come as (batch, height, width, channels) instead of (batch, channels, height, width).
INFERENCE_ONLY
    True where the framework can only run a network forward: the trainer then has no `step` and no `gradients`, and
    `phases` answers {h2d, forward} at most. May be left out: False.
own_samples(network, batch, seed) -> object with read() and first() -> (images, labels), settle(), close()
    where the inputs are the adapter's own business; may be left out: images or tokens, as the description says.
versions() -> {"framework": version, "blas": name of what multiplies matrices}
build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode) -> trainer
    `network` is the description's JSON object, `weights` maps a parameter's name to its float32 array in the
    description's layout. The step is plain SGD on the mean softmax cross-entropy, batch norm with the batch's own
    statistics (running ones are not kept, since nothing reads them), dropout on. `dtype` other than float32 is mixed
    precision as the framework offers it: weights stay float32. `mode` is the Setting's. What the framework cannot
    express raises NotImplementedError with the reason: that is an answer, not a failure.

and the trainer, whose `images` are float32 arrays (int64 (batch, steps) where the network has a vocabulary) and
`labels` int64 arrays in host memory; without `phases` or `layer_times` where the setting has no such thing:

step(images, labels) -> loss
    copy to the device, forward, backward, update, then wait for the device.
phases(images, labels) -> {h2d, forward, backward, update}: seconds of one step's parts, none below 0.
layer_times(images, labels) -> [{layer, forward_s, backward_s}]
    in forward order, layers run one by one on this batch's real values, the device awaited after each; the loss
    belongs to no layer. Backward includes summing the gradients of an output that feeds several layers.
profiled_step(images, labels) -> {"layers": as layer_times gives them, "parts": {part: seconds}}
    where the framework can time the layers inside a whole step; then layer_times serves only where this is absent or
    None. Layers and parts together are the whole step, less what the adapter measured its instruments to add: h2d, loss
    (forward and backward), update, dispatch (nothing of these runs), other (operations that belong to none of them).
gradients(images, labels) -> {"outputs", "loss", parameter name: gradient}
    at the present weights, dropout off, in the description's layout.
layer_by_layer(images, labels) -> (the same, {parameter name: the gradient that came out, in the framework's layout})
arrays({parameter name: tensor}) -> {parameter name: array in the description's layout}
flops(images, labels) -> {forward, backward}
    of matrix products (convolutions, dense layers, an LSTM's and attention's), one sample, counted by the framework's
    own counter; None where it has none.
shapes(images) -> {layer: shape of its output in the description's layout, without the batch}
describe(images) -> {"layers": [{name, kind, out_shape, parameters: [{name, shape}]}], "unused", "tied", "frozen"}
    only where the network is found and not told: torch_module.py, which then needs no `gradients` and no `flops`.
parameter_count() -> int, of the tensors it trains
device_peak_bytes() -> int, or None where the process' own memory is what counts
"""
