"""Theano 1.0.5, really run."""

import vintage


class TestTheano(vintage.Checks):
    setting, version, blas = "theano", "1.0.5", "OpenBLAS"
    unsupported = {"googlenet": "equal maxima"}
