"""Sufficient factors, sparse all-reduce: published decisions, exact counts, limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.core.errors import InputError
from steptime.model.collectives import AllReduce
from steptime.model.parameter_server import ParameterServer
from steptime.model.sparse import Sparse
from steptime.model.sufficient_factors import factor_values, is_factored, server_values, switch_workers


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "switch"),
    [
        (25088, 4096, 32, 220),
        (4096, 4096, 32, 128),
        (4096, 21841, 32, 216),
        (4096, 1000, 32, 50),
        (1024, 1000, 128, 7.9),
    ],
)
def test_the_published_layers_switch_where_algebra_says(rows, columns, batch, switch):
    assert switch_workers(rows, columns, batch) == pytest.approx(switch, rel=0.01)


@given(
    rows=st.integers(1, 30_000), columns=st.integers(1, 30_000), batch=st.integers(1, 512), workers=st.integers(2, 512)
)
def test_factors_win_below_the_switch_and_only_there(rows, columns, batch, workers):
    assert is_factored(rows, columns, batch, workers, workers) == (
        workers * batch * (rows + columns) <= 2 * rows * columns
    )


def test_values_of_a_node_are_those_through_its_interface():
    """In and out of a node that is both: as a server workers - 1 parts, as a worker servers - 1, each way and phase."""
    workers, rows, columns = 16, 4096, 1000
    phase = ParameterServer(workers, workers, AllReduce(0.0, 1.0)).time_s(float(rows * columns)) / 2
    assert server_values(rows, columns, workers, workers) == pytest.approx(4 * phase)
    assert factor_values(2, 3, 4, 5) == 2 * 4 * 4 * 5


def test_a_layer_of_which_nothing_is_sent_is_refused():
    with pytest.raises(InputError, match="batch = 0"):
        switch_workers(2, 2, 0)


def test_sparse_sends_the_norms_and_the_chosen_share():
    dense = AllReduce(1e-3, 1e-9)
    cost = Sparse(dense, 0.85, 65_536, 2e-3)
    chunks = 1000
    expected = 2 * 1e-3 + 4 * chunks * 1e-9 + 2e-3 + 0.15 * chunks * 65_536 * 1e-9
    assert cost.time_s(chunks * 65_536.0) == pytest.approx(expected)
    assert cost.a_s == pytest.approx(4e-3)
    np.testing.assert_allclose(cost.time_s(np.array([chunks * 65_536.0, 0.0])), [expected, 4e-3])


@pytest.mark.parametrize(
    ("sparsity", "chunk", "words"), [(1.0, 8, "sparsity"), (-0.1, 8, "sparsity"), (0.5, 0, "chunk")]
)
def test_an_impossible_sparsity_is_refused(sparsity, chunk, words):
    with pytest.raises(InputError, match=words):
        Sparse(AllReduce(0, 1e-9), sparsity, chunk)
