# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.sparse.stored_contexts import FINGERPRINT, TOKENS
from vllm_relay.sparse.contexts.context_fingerprint import token_chain


def test_a_hash_depends_on_all_tokens_before_it_and_no_later_one() -> None:
    chain = token_chain(TOKENS, FINGERPRINT)
    assert chain.shape == (1000 // 16, 16) and chain.dtype == np.uint8
    assert len({link.tobytes() for link in chain}) == len(chain)
    for length in (1, 15, 16, 17, 31, 999):
        assert np.array_equal(token_chain(TOKENS[:length], FINGERPRINT), chain[: length // 16])
    for changed in (0, 37, 991, 992, 999):
        tokens = TOKENS.copy()
        tokens[changed] += 1
        is_same = (token_chain(tokens, FINGERPRINT) == chain).all(axis=1)
        assert is_same.tolist() == [i < changed // 16 for i in range(len(chain))]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, ">i4"])
def test_hashes_do_not_depend_on_the_dtype_of_the_ids(dtype: Any) -> None:
    expected = token_chain(TOKENS, FINGERPRINT)
    assert np.array_equal(token_chain(TOKENS.astype(dtype), FINGERPRINT), expected)
    assert np.array_equal(token_chain(TOKENS.tolist(), FINGERPRINT), expected)


@pytest.mark.parametrize(
    "changes",
    [{"model": "other"}, {"model_hash": ""}, {"num_layers": 3}, {"dtype": "float16"}, {"rope": {}}],
)
def test_hashes_depend_on_every_field_of_the_fingerprint(changes: dict[str, Any]) -> None:
    other = token_chain(TOKENS, replace(FINGERPRINT, **changes))
    assert (other != token_chain(TOKENS, FINGERPRINT)).any(axis=1).all()


def test_differences_name_field_found_and_expected() -> None:
    other = replace(FINGERPRINT, num_layers=4, rope={"theta": 5e5})
    assert FINGERPRINT.differences(FINGERPRINT) == []
    assert FINGERPRINT.differences(other) == [
        "num_layers is 2, expected 4",
        "rope is {'scaling': {'factor': 2}, 'theta': 10000.0}, expected {'theta': 500000.0}",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "model is None"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 2.0}, "num_kv_heads is 2.0"),
        ({"head_size": True}, "head_size is True"),
        ({"num_layers": 2**40}, "num_layers"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rope": []}, "rope is"),
        ({"rope": {"theta": float("nan")}}, r"rope\['theta'\] is nan"),
    ],
)
def test_unusable_fields_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(FINGERPRINT, **changes)


@pytest.mark.parametrize("tokens", [[], [[1], [2]], [0.5], [-1], [2**31], np.int32(3)])
def test_what_are_no_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens"):
        token_chain(tokens, FINGERPRINT)
