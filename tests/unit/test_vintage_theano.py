"""Theano 1.0.5, really run."""

from typing import ClassVar

import vintage


class TestTheano(vintage.Checks):
    setting, version, blas = "theano", "1.0.5", "OpenBLAS"
    instruments = False
    unsupported: ClassVar[dict[str, str]] = {"googlenet": "equal maxima"}
