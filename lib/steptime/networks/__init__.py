"""The networks: one framework-neutral description each."""

from steptime.networks.builder import INPUT, Builder
from steptime.networks.costs import activation_bytes, parameter_bytes
from steptime.networks.zoo import NAMES, SIZES, build

__all__ = ["INPUT", "NAMES", "SIZES", "Builder", "activation_bytes", "build", "parameter_bytes"]
