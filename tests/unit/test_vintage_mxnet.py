"""MXNet 1.9.1, really run."""

import vintage


class TestMxnet(vintage.Checks):
    setting, version, blas = "mxnet", "1.9.1", "oneDNN"
