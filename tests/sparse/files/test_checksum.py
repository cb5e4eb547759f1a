# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from vllm_relay._C import find_damage
from vllm_relay.sparse.files.checksum import (
    checksum_pages,
    crc32c,
    kernels,
)

RANDOM = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)
# RFC 3720, appendix B.4
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def naive_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_checksums(kernel: str, data: bytes, expected: int) -> None:
    assert crc32c(data, kernel=kernel) == expected


def test_portable_equals_the_definition() -> None:
    data = RANDOM[:1000].tobytes()
    for length in (*range(40), 999, 1000):
        assert crc32c(data[:length], kernel="portable") == naive_crc32c(data[:length])


@pytest.mark.parametrize("kernel", kernels()[:-1])
def test_fast_kernels_equal_the_portable_one_at_every_alignment_and_length(kernel: str) -> None:
    lengths = [*range(530), 767, 768, 769, 3071, 3072, 3073, 3264, 6144, 6200, 12_289]
    for alignment in range(64):
        for length in lengths if alignment < 9 else lengths[alignment::64]:
            data = RANDOM[alignment : alignment + length]
            expected = crc32c(data, kernel="portable")
            assert crc32c(data, kernel=kernel) == expected, (alignment, length)


@pytest.mark.parametrize("kernel", kernels())
def test_a_checksum_continues_another(kernel: str) -> None:
    whole = crc32c(RANDOM, kernel="portable")
    for cut in (0, 1, 7, 255, 256, 257, 5000, len(RANDOM)):
        first = crc32c(RANDOM[:cut], kernel=kernel)
        assert crc32c(RANDOM[cut:], first, kernel=kernel) == whole


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="'abacus'"):
        crc32c(b"", kernel="abacus")


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 512, 513, 5 * 512, 5 * 512 + 3])
def test_page_checksums_are_those_of_the_pages(num_bytes: int) -> None:
    data = RANDOM[:num_bytes]
    expected = [crc32c(data[begin : begin + 512]) for begin in range(0, num_bytes, 512)]
    assert checksum_pages(data, 512).tolist() == expected


def test_arrays_of_any_dtype_count_as_their_bytes() -> None:
    numbers = RANDOM.view(np.float32).reshape(50, 100)
    assert crc32c(numbers) == crc32c(RANDOM)
    assert checksum_pages(numbers, 4096).tolist() == checksum_pages(RANDOM, 4096).tolist()


def test_the_first_damaged_page_is_found() -> None:
    data, checksums = RANDOM.copy(), checksum_pages(RANDOM, 512)
    assert find_damage(data, 512, checksums) == (-1, 0)
    for page in (len(checksums) - 1, 38, 7):
        data[page * 512 + 11] ^= 4
        found = crc32c(data[page * 512 : (page + 1) * 512])
        assert find_damage(data, 512, checksums) == (page, found)


def test_wrong_counts_of_checksums_are_refused() -> None:
    with pytest.raises(ValueError, match="given 39, expected 40"):
        find_damage(RANDOM, 512, checksum_pages(RANDOM, 512)[1:])
