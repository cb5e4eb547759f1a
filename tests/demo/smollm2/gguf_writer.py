# SPDX-License-Identifier: Apache-2.0
"""Writes small GGUF files, number by number; what `gguf.py` reads is compared with it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

_F32, _Q4_1, _Q8_0 = 0, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> bytes:
    """Its kind and the value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case list():
            items = [typed(item) for item in value]
            return (
                struct.pack("<I", 9)
                + items[0][:4]
                + struct.pack("<Q", len(items))
                + b"".join(item[4:] for item in items)
            )
    raise TypeError(value)


def q8_0(ints: list[int], scale: float) -> bytes:
    return struct.pack("<e32b", scale, *ints)


def q4_1(nibbles: list[int], scale: float, least: float) -> bytes:
    packed = [nibbles[i] | nibbles[i + 16] << 4 for i in range(16)]
    return struct.pack("<ee16B", scale, least, *packed)


def q8_0_tensor(weight: np.ndarray) -> tuple[tuple[int, ...], int, bytes]:
    """Of whole numbers that fit eight bits."""
    blocks = weight.reshape(-1, 32).astype(int).tolist()
    return weight.shape, _Q8_0, b"".join(q8_0(block, 1.0) for block in blocks)


def f32_tensor(weight: np.ndarray) -> tuple[tuple[int, ...], int, bytes]:
    return weight.shape, _F32, weight.astype("<f4").tobytes()


def q4_1_tensor(shape: tuple[int, ...], blocks: list[bytes]) -> tuple[tuple[int, ...], int, bytes]:
    return shape, _Q4_1, b"".join(blocks)


def write_gguf(
    path: Path,
    values: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]],
    version: int = 3,
) -> Path:
    header = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(values))
    header += b"".join(text(name) + typed(value) for name, value in values.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path
