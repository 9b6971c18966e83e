"""Caffe 1.0, really run."""

from typing import ClassVar

import numpy as np
import pytest
import vintage

from steptime.core.network import Network
from steptime.frameworks import Child
from steptime.networks import INPUT, Builder


def shared() -> Network:
    """Layers that Caffe would run in place, where they may and where another reads what they would overwrite."""
    b = Builder((3, 16, 16))
    x = b.conv("conv", INPUT, 6, 3, groups=3, bias=False)
    left = b.relu("left", x)
    right = b.batch_norm("right", x)
    x = b.add("sum", left, right, b.lrn("lrn", left, size=3, alpha=0.5, k=2))
    x = b.relu("after_lrn", b.lrn("lrn2", x))
    x = b.concat("joined", b.avg_pool("mean", x, 3, pad=1), b.caffe_max_pool("max", x, 3, stride=1, pad=1), x)
    flat = b.flatten("flat", b.caffe_max_pool("pool", x, 3, stride=2))
    x = b.dense("fc", b.relu("relu", flat), 9)
    y = b.sigmoid("sigmoid", b.dense("fc2", flat, 9, bias=False))
    b.dense("last", b.add("both", x, b.relu("relu2", b.batch_norm("bn", y))), 5)
    return b.network("shared", "quick")


class TestCaffe(vintage.Checks):
    setting, version, blas = "caffe", "1.0.0", "OpenBLAS"
    unsupported: ClassVar = {
        "transformer": "layer block1_attention: Caffe 1.0 has no product",
        "patchwork": "layer conv: Caffe pads both edges alike",
    }

    def test_nothing_that_is_read_elsewhere_is_overwritten(
        self, processes: tuple[Child, Child], tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(vintage.NETWORKS, "shared", shared())
        theirs, ours = (vintage.built(process, "shared", 5, tmp_path / "arrays.npz")["arrays"] for process in processes)
        found = vintage.distances(ours, theirs)
        assert max(found.values()) <= vintage.TOLERANCE, found
        # an update by the solver moves the weights that the gradients are taken at
        processes[1].request("steps", count=1)
        processes[1].request("gradients", path=str(tmp_path / "later.npz"))
        with np.load(tmp_path / "later.npz") as later:
            assert later["loss"] != ours["loss"]
