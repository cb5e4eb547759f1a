# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.refusals import ended
from vllm_relay.demo.long_contexts.run import run_long_demo
from vllm_relay.demo.options import DemoOptions

SIZES = {"document_tokens": 4096, "num_questions": 3, "output_tokens": 8}


def recording_console() -> Console:
    return Console(width=200, record=True, force_terminal=False)


@pytest.mark.integration
@pytest.mark.usefixtures("quick_engines")
def test_relay_sparse_answers_right_and_holds_a_window(tmp_path: Path) -> None:
    console = recording_console()
    options = DemoOptions(
        dtype="float32", keep=tmp_path, json_path=tmp_path / "numbers.json", console=console
    )
    status = run_long_demo(options, **SIZES)
    text = console.export_text()
    assert status == 0, text
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    dense, sparse = numbers["relay"], numbers["relay_sparse"]
    assert numbers["passed"]
    assert dense["answers_right"] == sparse["answers_right"] == numbers["identical_outputs"] == 3
    # keys and values of 2 layers, 2 KV heads of size 128
    bytes_per_token = 2 * 2 * 2 * 128 * 4
    assert dense["decode_kv_bytes"] >= 4096 * bytes_per_token
    # 64 sinks and a window of 256 tokens, in blocks of 128
    assert sparse["decode_kv_bytes"] <= 5 * 128 * bytes_per_token
    assert text.count("right") >= 6
    assert "wrong" not in text


def assert_refused(message: str, options: DemoOptions, **sizes: int) -> None:
    status, refusal = ended(lambda: run_long_demo(options, **sizes))
    assert status == 2 and message in refusal


def test_settings_out_of_range_are_explained(tmp_path: Path) -> None:
    for sizes, message in [
        ({"document_tokens": 1000}, "document_tokens is 1000, expected 4096 to 32000"),
        ({"num_questions": 1}, "num_questions is 1, expected at least 2"),
        ({"num_questions": 9999}, "num_questions is 9999, expected 1 to"),
        ({"output_tokens": 2}, "output_tokens is 2, expected at least 3"),
        ({"output_tokens": 9}, "output_tokens is 9, expected 2 to 8"),
    ]:
        options = DemoOptions(keep=tmp_path, console=recording_console())
        assert_refused(message, options, **{**SIZES, **sizes})
    for given, message in [
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"json_path": tmp_path / "missing" / "numbers.json"}, "missing"),
    ]:
        options = DemoOptions(**given, keep=tmp_path, console=recording_console())
        assert_refused(message, options, **SIZES)
