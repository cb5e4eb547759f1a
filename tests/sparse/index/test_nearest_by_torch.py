# SPDX-License-Identifier: Apache-2.0
"""The nearest keys do not depend on where they are looked for."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_relay.sparse.index import nearest
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.key_codes import encode


def _both(keys: Elements, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    codes, rows = encode(keys, threads=1)
    # a name that is not "cpu" to the dispatcher, and the CPU to torch
    by_torch = nearest.nearest_keys(keys, codes, rows, queries, k, threads=1, device="cpu:0")
    return nearest.nearest_keys(keys, codes, rows, queries, k, threads=1, device="cpu"), by_torch


@pytest.mark.parametrize("num_keys", [1, 7, 100, 3001, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integer_products_of_torch_choose_the_same_keys(num_keys: int, dtype: str) -> None:
    rng = np.random.default_rng(num_keys)
    keys = from_float32(rng.standard_normal((num_keys, 80)), dtype)
    queries = rng.standard_normal((70, 80)).astype(np.float32)
    by_cpu, by_torch = _both(keys, queries, 100)
    np.testing.assert_array_equal(by_cpu, by_torch)


def test_equal_codes_and_outliers_are_chosen_alike() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((40, 64)).astype(np.float32)[rng.integers(0, 40, 5000)]
    keys[[17, 3000]] *= 1e4
    queries = rng.standard_normal((33, 64)).astype(np.float32)
    by_cpu, by_torch = _both(from_float32(keys, "float32"), queries, 50)
    np.testing.assert_array_equal(by_cpu, by_torch)


def test_products_that_do_not_fit_at_once_are_taken_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nearest, "_PRODUCTS_AT_ONCE", 1)
    rng = np.random.default_rng(1)
    keys = from_float32(rng.standard_normal((300, 32)), "float32")
    queries = rng.standard_normal((100, 32)).astype(np.float32)
    by_cpu, by_torch = _both(keys, queries, 20)
    np.testing.assert_array_equal(by_cpu, by_torch)
