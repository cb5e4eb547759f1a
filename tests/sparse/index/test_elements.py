# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_relay.sparse.index.elements import DTYPES, STORAGE, Elements, as_elements, from_float32

FLOATS = hnp.arrays(
    np.float32, st.integers(0, 20), elements=st.floats(width=32, allow_nan=False)
)  # fmt: skip


@given(values=FLOATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_torch(dtype: str, values: np.ndarray) -> None:
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    elements = from_float32(values, dtype)
    assert elements.data.dtype == STORAGE[dtype]
    assert np.array_equal(elements.to_float32(), expected.float().numpy())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_pattern_of_bits_reads_as_torch_does(dtype: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(Elements(bits, dtype).to_float32(), expected, equal_nan=True)
    finite = np.isfinite(expected)
    as_elements("x", Elements(bits[finite], dtype))
    for bad in bits[~finite]:
        with pytest.raises(ValueError, match=r"^x: NaN or infinity at \[1\]"):
            as_elements("x", Elements(np.array([0, bad], np.uint16), dtype))


@pytest.mark.parametrize(
    ("given_dtype", "kept"),
    [
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float64, "float32"),
    ],
)
def test_tensors_and_arrays_are_kept_in_their_dtype(given_dtype: torch.dtype, kept: str) -> None:
    tensor = torch.randn(6, 5).to(given_dtype)
    elements = as_elements("x", tensor)
    assert elements.dtype == kept and elements.shape == (6, 5)
    assert np.array_equal(elements.to_float32(), tensor.float().numpy())
    if given_dtype is not torch.bfloat16:
        assert np.array_equal(as_elements("x", tensor.numpy()).data, elements.data)
    strided = torch.randn(5, 6).to(given_dtype).T
    assert np.array_equal(as_elements("x", strided).to_float32(), strided.float().numpy())
    assert as_elements("x", strided).data.flags.c_contiguous


def test_nothing_is_copied_that_need_not_be() -> None:
    array = np.ones((3, 4), np.float32)
    for kept in (array, torch.from_numpy(array), Elements(array, "float32")):
        assert np.shares_memory(as_elements("x", kept).data, array)
    halves = torch.ones(3, 4, dtype=torch.bfloat16)
    elements = as_elements("x", halves)
    halves[1, 2] = 3
    assert elements.to_float32()[1, 2] == 3


def test_a_wanted_dtype_is_given() -> None:
    array = np.array([[1.0, 1 + 2.0**-9]], np.float32)
    for dtype in DTYPES:
        elements = from_float32(array, dtype)
        assert elements.dtype == dtype
        back = from_float32(elements.to_float32(), "float32")
        assert np.array_equal(back.data, elements.to_float32())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(2, np.int32), "x: dtype int32"),
        (torch.ones(2, dtype=torch.int8), "x: dtype int8"),
        (torch.ones(2, dtype=torch.complex64), "x: dtype complex64"),
        (torch.ones(2, device="meta"), "x: on meta, expected a tensor on the CPU"),
        (from_float32(np.array([1, 1e6]), "float16"), r"x: NaN or infinity at \[1\]"),
        (np.array([[1, 2], [3, np.nan]]), r"x: NaN or infinity at \[1, 1\]"),
        (["a"], "x: dtype"),
        ([[1.0], [1.0, 2.0]], "x: .*inhomogeneous"),
    ],
)
def test_unusable_arrays_are_refused(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        as_elements("x", array)


def test_rows_are_views() -> None:
    elements = from_float32(np.arange(20, dtype=np.float32).reshape(10, 2), "bfloat16")
    part = elements.rows(3, 5)
    assert part.dtype == "bfloat16" and np.shares_memory(part.data, elements.data)
    assert part.to_float32().tolist() == [[6, 7], [8, 9]]
