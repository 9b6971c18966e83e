"""A layer profile where only the step's time is known: layers share it by their floating-point operations."""

import numpy as np

from steptime.core.errors import InputError
from steptime.core.network import Network
from steptime.core.step import LayerProfile
from steptime.networks.costs import activation_bytes, parameter_bytes


def flops_profile(
    network: Network,
    *,
    batch: int,
    step_s: float,
    source: str,
    backward_share: float | None = None,
    dtype: str = "float32",
) -> LayerProfile:
    """The profile of `network` on a device that takes `step_s` seconds for a step of `batch` samples.

    Forward and backward are shared out among the layers by their own FLOPs; `backward_share` of the step is backward
    (None: as of the FLOPs). It is a statement about shares: on devices element-wise layers take more than theirs.
    Bytes are those of `dtype`. Raises InputError for a time that is not above 0 or a share outside 0 to 1.
    """
    if not 0 < step_s < np.inf:
        raise InputError(f"step_s = {step_s}: must be above 0; correct the time")
    forward = np.array([layer.forward_flops for layer in network.layers], dtype=float)
    backward = np.array([layer.backward_flops for layer in network.layers], dtype=float)
    share = backward.sum() / (forward.sum() + backward.sum()) if backward_share is None else backward_share
    if not 0 < share < 1:
        raise InputError(f"backward_share = {share}: must lie between 0 and 1; correct the share")
    return LayerProfile(
        network=network.name,
        source=source,
        batch=batch,
        layers=tuple(layer.name for layer in network.layers),
        forward_s=forward / forward.sum() * (1 - share) * step_s,
        backward_s=backward / backward.sum() * share * step_s,
        parameter_bytes=np.array([parameter_bytes(layer, dtype) for layer in network.layers], dtype=float),
        activation_bytes=np.array([activation_bytes(layer, batch, dtype) for layer in network.layers], dtype=float),
    )
