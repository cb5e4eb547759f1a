# SPDX-License-Identifier: Apache-2.0
"""`KeyIndex.save` and `load`, with an index that is nothing but its arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sparse.stored_contexts import ArraysIndex, head
from vllm_relay.sparse.files.section_file import SectionFile, write_sections
from vllm_relay.sparse.index.key_index import IndexDamagedError


class OtherIndex(ArraysIndex):
    kind = "other arrays of tests"


@pytest.mark.parametrize("mmap", [True, False])
def test_an_index_comes_back_as_it_was_saved(tmp_path: Path, mmap: bool) -> None:
    saved = head(1, 0).index
    saved.save(tmp_path / "index")
    loaded = ArraysIndex.load(tmp_path / "index", mmap=mmap)
    (tmp_path / "index").unlink()
    assert loaded.keys.dtype == "bfloat16"
    assert np.array_equal(loaded.keys.data, saved.keys.data)
    assert np.array_equal(loaded.links, saved.links)
    assert not loaded.links.flags.writeable


@pytest.mark.parametrize("mmap", [True, False])
def test_damaged_indexes_are_refused(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "index"
    head(1, 0).index.save(path)
    content = bytearray(path.read_bytes())
    content[SectionFile.open(path).sections["links"].offset_bytes + 12_345] ^= 2
    path.write_bytes(content)
    with pytest.raises(IndexDamagedError, match="section 'links', page 0"):
        ArraysIndex.load(path, mmap=mmap)


def test_other_files_are_refused(tmp_path: Path) -> None:
    head(1, 0).index.save(tmp_path / "index")
    with pytest.raises(IndexDamagedError, match="expected a other arrays of tests key index"):
        OtherIndex.load(tmp_path / "index")
    write_sections(tmp_path / "other", {}, {})
    with pytest.raises(IndexDamagedError, match=r"holds \(None, None\)"):
        ArraysIndex.load(tmp_path / "other")
