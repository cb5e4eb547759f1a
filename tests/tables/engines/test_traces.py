# SPDX-License-Identifier: Apache-2.0
"""Spans of vLLM in this process below those of jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from tests.support import vllm_processes
from tests.tables.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.integration


def test_requests_are_children_of_their_job(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(model)
    done = vllm_processes.run_module(
        "tests.tables.engines.traces_main", [str(model), str(tmp_path)], {}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    spans = found["spans"]
    [caller] = [each for each in spans if each["name"] == "caller"]
    [job] = [each for each in spans if each["name"].startswith("chat")]
    assert job["name"] == f"chat {model}" and job["parent"] == caller["id"]
    requests = [each for each in spans if each["name"] == "llm_request"]
    assert len(requests) == 4
    # of the job without an endpoint vLLM is told nothing
    children = [each for each in requests if each["parent"] == job["id"]]
    assert len(children) == 2
    tokens = sum(each["attributes"]["gen_ai.usage.prompt_tokens"] for each in children)
    assert tokens == found["prompt_tokens"] == job["attributes"]["gen_ai.usage.input_tokens"]
