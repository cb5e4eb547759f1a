# SPDX-License-Identifier: Apache-2.0
"""Tests that touch vLLM are marked so without anybody marking them."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

import pytest

from tests.support.vllm_users import ROOT, touches_vllm


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/prefix_cache/eviction/test_free_queue.py", True),  # imports vLLM
        ("tests/modules/engine/test_worker.py", True),
        ("tests/long_context/scheduling/test_scheduler.py", True),  # its helpers do
        ("tests/test_limits.py", True),  # what it tests does
        ("tests/attention_backends/test_forest.py", False),
        ("tests/sparse/index/test_flat.py", False),
        ("tests/tables/sql/test_statements.py", False),
    ],
)
def test_files_that_touch_vllm_are_found(file: str, expected: bool) -> None:
    assert touches_vllm(ROOT / file) is expected


def test_every_file_whose_code_imports_vllm_is_found() -> None:
    """As it is compiled, beside the rule."""
    missed = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if not touches_vllm(file)
        and any(name.split(".")[0] == "vllm" for name in imports_of(file.read_text()))
    ]
    assert not missed


def imports_of(source: str) -> Iterator[str]:
    pending = [compile(source, "source", "exec")]
    while pending:
        code = pending.pop()
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                yield instruction.argval


def test_tests_that_start_engines_are_marked(request: pytest.FixtureRequest) -> None:
    starters = [
        item for item in request.session.items if item.get_closest_marker("integration") is not None
    ]
    assert all(item.get_closest_marker("vllm") is not None for item in starters)


def test_this_file_is_not_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("vllm") is None
