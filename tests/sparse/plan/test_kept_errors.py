# SPDX-License-Identifier: Apache-2.0
"""A plan keeps its error for queries that are like none that it was made with."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sparse.planned_heads import costs_with_cheap
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.sparse_layer import SparseLayer
from vllm_relay.sparse.plan.index_choice import build_index
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import SHIPPED_COSTS, read_costs

KEYS, SIZE, GROUP = 4000, 32, 2


def _keys_and_values() -> tuple[Elements, Elements]:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, KEYS, SIZE), np.float32)
    return from_float32(2 * rows[0], "bfloat16"), from_float32(rows[1], "bfloat16")


def _queries(keys: Elements, begin: int, end: int, length: float, seed: int) -> np.ndarray:
    """[end - begin, SIZE]; each looks for one of these keys, the longer the more for it alone."""
    rng = np.random.default_rng(seed)
    noise = 0.3 * rng.standard_normal((end - begin, SIZE), np.float32)
    return np.float32(length) * (keys.to_float32()[begin:end] + noise)


def _errors(
    index: CompiledIndex, asked: object, keys: Elements, values: Elements, queries: np.ndarray
) -> np.ndarray:
    layer = SparseLayer([index], [values])
    rows = queries.astype(np.float64)
    weights = np.exp(rows @ keys.to_float32().T / SIZE**0.5)
    exact = weights @ values.to_float32() / weights.sum(axis=1, keepdims=True)
    found = [layer.attend(row[None, None], [asked])[0].output[0, 0] for row in queries]
    return np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)


@pytest.mark.parametrize("cheap", ["coarse", "graph", "flat", "shipped"])
@pytest.mark.parametrize(("seen", "later"), [(0.5, 3.0), (3.0, 0.5), (1.0, 2.0)])
@pytest.mark.parametrize("max_error", [0.01, 0.1])
def test_queries_that_look_for_what_none_did_before(
    cheap: str, seen: float, later: float, max_error: float
) -> None:
    """Those of the first half of the keys are known, and others come, which look more, or less, for
    one key alone."""
    keys, values = _keys_and_values()
    train = _queries(keys, 0, KEYS // 2, seen, seed=1)
    costs = read_costs(SHIPPED_COSTS) if cheap == "shipped" else costs_with_cheap(cheap)
    index, plan = build_index(
        1, keys, values, from_float32(train, "float32"), GROUP, DBOptions(max_error=max_error),
        costs,
    )  # fmt: skip
    assert plan is not None and isinstance(index, CompiledIndex)
    queries = _queries(keys, KEYS // 2, KEYS // 2 + 300, later, seed=2)
    errors = _errors(index, plan.query_for(KEYS), keys, values, queries)
    assert np.quantile(errors, 0.99) <= max_error
