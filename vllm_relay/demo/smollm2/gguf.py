# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, as far as SmolLM2's needs it: version 3, weights in F32, Q4_1 and Q8_0.

A file is a header, named values, a table of tensors and, from the next multiple of the alignment
on, their bytes.  Quantized tensors are blocks of 32 weights:

    Q8_0   scale (float16), 32 int8                       weight = scale * int
    Q4_1   scale, least (float16), 16 bytes of nibbles    weight = scale * nibble + least

Byte i of a Q4_1 block holds weight i in its low nibble and weight i + 16 in its high one.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT_BYTES = 32
_BLOCK_WEIGHTS = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCKS = {
    _Q4_1: np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", _BLOCK_WEIGHTS // 2)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("ints", "i1", _BLOCK_WEIGHTS)]),
}


class GgufFile:
    """A file whose weights are read when they are asked for.

    Attributes:
        values: by name; numbers, texts, truths, or lists of them.
        tensor_names: in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: it is no GGUF file of version 3, or has a kind of tensor that is not read.
        """
        self._bytes = np.memmap(path, np.uint8, mode="r")
        self._path = path
        self._position = 0
        magic, version = self._take(4), self._number("I")
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{path}: begins with {magic!r} and version {version}, expected "
                             f"{_MAGIC!r} and {_VERSION}")  # fmt: skip
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._text()
            self.values[name] = self._value(self._number("I"))
        self._tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            sizes = [self._number("Q") for _ in range(self._number("I"))]
            kind, offset = self._number("I"), self._number("Q")
            if kind not in (_F32, *_BLOCKS):
                raise ValueError(f"{path}: tensor {name} is of kind {kind}, expected F32 ({_F32}), "
                                 f"Q4_1 ({_Q4_1}) or Q8_0 ({_Q8_0})")  # fmt: skip
            self._tensors[name] = tuple(reversed(sizes)), kind, offset
        alignment = self.values.get("general.alignment", _ALIGNMENT_BYTES)
        self._begin = math.ceil(self._position / alignment) * alignment

    @property
    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, its sizes as in torch: the last one varies fastest."""
        shape, kind, offset = self._tensors[name]
        count = math.prod(shape)
        data = self._bytes[self._begin + offset :]
        if kind == _F32:
            return data[: 4 * count].view("<f4").reshape(shape).copy()
        dtype = _BLOCKS[kind]
        blocks = data[: count // _BLOCK_WEIGHTS * dtype.itemsize].view(dtype)
        scale = blocks["scale"].astype(np.float32)[:, None]
        if kind == _Q8_0:
            return (scale * blocks["ints"]).reshape(shape)
        nibbles = blocks["nibbles"]
        steps = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
        return (scale * steps + blocks["least"].astype(np.float32)[:, None]).reshape(shape)

    def _take(self, count: int) -> bytes:
        taken = self._bytes[self._position : self._position + count].tobytes()
        if len(taken) < count:
            raise ValueError(f"{self._path} ends after {len(self._bytes)} bytes, in the middle")
        self._position += count
        return taken

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            return [self._value(kind) for _ in range(count)]
        return self._number(_NUMBERS[kind])
