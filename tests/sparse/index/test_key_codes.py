# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.key_sets import MAGNITUDES, TRAPS, trap
from tests.support.depth import cases
from vllm_relay.sparse.index.elements import DTYPES, Elements, from_float32
from vllm_relay.sparse.index.key_codes import (
    MAX_OUTSIDE,
    KeyCodes,
    encode,
    encode_rows,
    lay_out_blocks,
    restore_codes,
    row_bytes,
)


def decoded(codes: KeyCodes, rows: np.ndarray) -> np.ndarray:
    whole = rows[:, : len(codes.mean)].astype(np.float64) - 128
    return codes.mean.astype(np.float64) + codes.step.astype(np.float64) * whole


@settings(max_examples=cases(50))
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 600),
    d=st.integers(1, 256),
    magnitude=st.sampled_from([1e-44, 1e-40, *MAGNITUDES, 1e34]),
)
def test_keys_are_what_their_codes_say(seed: int, n: int, d: int, magnitude: float) -> None:
    rng = np.random.default_rng(seed)
    name, dtype = TRAPS[rng.integers(len(TRAPS))], DTYPES[rng.integers(3)]
    if magnitude > 1e30 and name in ("norm outliers", "element outliers", "one wide dimension"):
        magnitude = 1.0
    keys, _ = trap(name, rng, n, d, 1, magnitude, dtype=dtype)
    codes, rows = encode(keys, 1)
    assert rows.shape == (n, row_bytes(d)) and rows.ctypes.data % 64 == 0
    assert (codes.step > 0).all() and np.isfinite(codes.mean).all()
    assert len(codes.outside) <= min(MAX_OUTSIDE, n // 8)
    assert (rows[:, d:] == 128).all() and (rows[codes.outside] == 128).all()
    inside = np.setdiff1d(np.arange(n), codes.outside)
    values = keys.to_float32()[inside].astype(np.float64)
    errors = (values - decoded(codes, rows[inside])) / codes.step
    assert (np.abs(errors) <= 0.5 + 1e-4).all()
    lengths = np.sqrt(((rows[inside, :d] - 128.0) ** 2).sum(axis=1))
    assert lengths.max() <= codes.longest <= 1.001 * lengths.max()
    wrong = np.sqrt((errors**2).sum(axis=1)).max()
    assert wrong <= codes.longest_error + 1e-3 and codes.longest_error <= 1.001 * wrong + 1e-3


def test_a_few_outliers_leave_the_others_their_resolution() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3000, 64))
    for factor in (1e2, 1e3, 1e6):
        spoilt = keys.copy()
        spoilt[[5, 700, 2999]] *= factor * rng.uniform(1, 2, (3, 1))
        codes, _ = encode(from_float32(spoilt, "float32"), 1)
        assert codes.outside.tolist() == [5, 700, 2999]
        assert (codes.step < 8 / 127).all()  # eight deviations


def test_a_dimension_that_is_mostly_zero_keeps_its_values() -> None:
    rng = np.random.default_rng(1)
    keys = np.where(rng.random((3000, 8)) < 0.7, 0, rng.standard_normal((3000, 8)))
    codes, _ = encode(from_float32(keys, "float32"), 1)
    assert len(codes.outside) <= MAX_OUTSIDE
    assert (codes.step < 0.05).all()


def test_each_dimension_has_a_step_of_its_own() -> None:
    rng = np.random.default_rng(2)
    scales = np.array([1e-6, 1.0, 1e6])
    codes, _ = encode(from_float32(rng.standard_normal((500, 3)) * scales, "float32"), 1)
    assert np.allclose(codes.step / scales, codes.step[1], rtol=0.4)


def test_equal_keys_are_their_mean() -> None:
    codes, rows = encode(from_float32(np.full((40, 5), 0.1, np.float32), "float32"), 1)
    assert np.allclose(decoded(codes, rows), np.float32(0.1))
    assert len(codes.outside) == 0 and codes.longest < 300


def test_magnitudes_whose_differences_overflow_are_refused() -> None:
    keys = from_float32(np.array([[3e38], [-3e38]], np.float32), "bfloat16")
    with pytest.raises(ValueError, match=r"^keys: magnitudes up to 3\S+, expected at most 1e\+38"):
        encode(keys, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_the_rows(dtype: str) -> None:
    keys, _ = trap("norm outliers", np.random.default_rng(3), 100, 70, 1, dtype=dtype)
    codes, rows = encode(keys, 1)
    part, outside, (longest, error) = encode_rows(
        keys.rows(45, 75), codes.mean, codes.step, threads=2
    )
    assert part.shape == (30, row_bytes(70))
    expected = codes.outside[(codes.outside >= 45) & (codes.outside < 75)] - 45
    assert np.array_equal(part, rows[45:75])
    assert np.array_equal(np.flatnonzero(outside), expected)
    assert 0 < longest <= codes.longest and 0 < error <= codes.longest_error


def test_codes_survive_their_arrays() -> None:
    keys = Elements(np.ones((3, 2), np.float32), "float32")
    codes, _ = encode(keys, 1)
    settings, arrays = codes.to_arrays()
    _, again = restore_codes({"dtype": keys.dtype, **settings}, {"keys": keys.data, **arrays})
    assert (again.longest, again.longest_error) == (codes.longest, codes.longest_error)
    for name in ("mean", "step", "outside"):
        assert np.array_equal(getattr(again, name), getattr(codes, name))


def test_blocks_hold_four_bytes_of_sixteen_keys_in_turn() -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (20, 128), np.uint8)
    order = rng.permutation(np.concatenate([np.arange(20), np.full(12, -1)])).astype(np.int32)
    blocks = lay_out_blocks(codes, order).reshape(2, 32, 16, 4)
    for place, key in enumerate(order):
        lane = blocks[place // 16, :, place % 16].reshape(-1)
        assert np.array_equal(lane, codes[key] if key >= 0 else np.full(128, 128))
