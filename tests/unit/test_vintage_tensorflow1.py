"""TensorFlow 1.14, really run."""

import vintage


class TestTensorFlow1(vintage.Checks):
    setting, version, blas = "tensorflow1", "1.14.0", "Eigen"
