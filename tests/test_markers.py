# SPDX-License-Identifier: Apache-2.0
"""Tests that touch vLLM are marked so without anybody marking them."""

from __future__ import annotations

import re

import pytest

from tests.support.vllm_users import ROOT, touches_vllm

IMPORT_OF_VLLM = re.compile(r"^ *(from|import) vllm\b", re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/prefix_cache/test_free_queue.py", True),  # imports vLLM
        ("tests/modules/test_worker.py", True),
        ("tests/long_context/test_scheduler.py", True),  # its helpers do
        ("tests/test_limits.py", True),  # what it tests does
        ("tests/attention_backends/test_forest.py", False),
        ("tests/sparse/test_flat.py", False),
        ("tests/tables/sql/test_statements.py", False),
    ],
)
def test_files_that_touch_vllm_are_found(file: str, expected: bool) -> None:
    assert touches_vllm(ROOT / file) is expected


def test_every_file_that_names_vllm_in_an_import_is_found() -> None:
    """Beside the rule: by plain text, which finds sources that tests make up too."""
    made_up = {
        "tests/upstream/test_differences.py",
        "tests/vllm_changes/test_touch_point_changes.py",
    }
    missed = {
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if IMPORT_OF_VLLM.search(file.read_text()) and not touches_vllm(file)
    }
    assert missed == made_up


def test_tests_that_start_engines_are_marked(request: pytest.FixtureRequest) -> None:
    starters = [
        item for item in request.session.items if item.get_closest_marker("integration") is not None
    ]
    assert all(item.get_closest_marker("vllm") is not None for item in starters)


def test_this_file_is_not_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("vllm") is None
