"""ONNX Runtime 1.19 and its training API, really run."""

import vintage


class TestOnnxRuntime(vintage.Checks):
    setting, version, blas = "onnxruntime", "1.19.2", "MLAS"
