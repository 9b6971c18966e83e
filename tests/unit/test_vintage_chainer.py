"""Chainer 7.8.1, really run."""

import vintage


class TestChainer(vintage.Checks):
    setting, version, blas = "chainer", "7.8.1", "OpenBLAS"
