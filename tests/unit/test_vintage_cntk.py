"""CNTK 2.7, really run."""

import vintage


class TestCntk(vintage.Checks):
    setting, version, blas = "cntk", "2.7", "Math Kernel Library"
    instruments = False
