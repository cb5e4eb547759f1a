# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.demo.smollm2.gguf_writer import (
    f32_tensor,
    q4_1,
    q4_1_tensor,
    q8_0,
    write_gguf,
)
from vllm_relay.demo.smollm2.gguf import GgufFile

VALUES = {
    "a.number": 7,
    "a.real": 0.5,
    "a.truth": True,
    "a.text": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n",
    "texts": ["one", "", "three"],
    "numbers": [3, 1],
}


def test_values_and_tensors_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(3, 5)).astype(np.float32)
    ints = rng.integers(-128, 128, (4, 32)).tolist()
    nibbles = rng.integers(0, 16, (4, 32)).tolist()
    scales, leasts = [0.5, 2.0, 0.25, 1.0], [-1.0, 0.0, 3.5, -8.0]
    path = write_gguf(
        tmp_path / "made.gguf",
        VALUES,
        {
            "plain": f32_tensor(plain),
            "eight": ((2, 64), 8, b"".join(map(q8_0, ints, scales))),
            "four": q4_1_tensor((2, 64), list(map(q4_1, nibbles, scales, leasts))),
        },
    )
    gguf = GgufFile(path)
    assert gguf.values == VALUES
    assert gguf.tensor_names == ["plain", "eight", "four"]
    assert np.array_equal(gguf.tensor("plain"), plain)
    eight = [s * i for row, s in zip(ints, scales, strict=True) for i in row]
    assert gguf.tensor("eight").ravel().tolist() == eight
    four = [s * n + low for row, s, low in zip(nibbles, scales, leasts, strict=True) for n in row]
    assert gguf.tensor("four").ravel().tolist() == four
    assert gguf.tensor("four").shape == (2, 64)
    assert gguf.tensor("four").dtype == np.float32


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="begins with b'PK"):
        GgufFile(path)
    with pytest.raises(ValueError, match="version 2, expected"):
        GgufFile(write_gguf(path, {}, {}, version=2))
    with pytest.raises(ValueError, match="tensor odd is of kind 2, expected F32"):
        GgufFile(write_gguf(path, {}, {"odd": ((32,), 2, bytes(18))}))
    whole = write_gguf(path, VALUES, {}).read_bytes()
    path.write_bytes(whole[:60])
    with pytest.raises(ValueError, match="ends after 60 bytes, in the middle"):
        GgufFile(path)
