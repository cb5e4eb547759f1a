# SPDX-License-Identifier: Apache-2.0
"""What the server of the rivals' benchmark counts."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.tables.rivals.prefix_cache_server import (
    BLOCK_SIZE_TOKENS,
    prefix_cache_server,
)
from tests.tables.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer


def test_a_chat_with_a_schema(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    asked_texts: list[str] = []

    def answer(prompt: str) -> str:
        asked_texts.append(prompt)
        return "4"

    schema = {"type": "object", "properties": {"stars": {"type": "integer"}}}
    message = {"role": "user", "content": [{"type": "text", "text": "How many of five?"}]}
    body = {
        "model": "tiny",
        "messages": [message],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    with prefix_cache_server(tmp_path, tokenizer, answer, num_blocks=None, is_vllm=False) as (
        server,
        asked,
    ):
        replies = [_post(f"{server.url}/v1/chat/completions", body) for _ in range(2)]
    assert [each["choices"][0]["message"]["content"] for each in replies] == ['{"stars": 4}'] * 2
    assert asked_texts == ["<|user|>\nHow many of five?<|end|>\n<|assistant|>\n"] * 2
    num_tokens = replies[0]["usage"]["prompt_tokens"]
    assert asked.num_tokens == 2 * num_tokens
    found = (num_tokens - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    assert asked.num_found_tokens(None) == found


def test_tokens_are_what_is_sent(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    body = {"model": "tiny", "prompt": tokenizer.encode("Is it  good ?")}
    with prefix_cache_server(tmp_path, tokenizer, str.upper, num_blocks=9, is_vllm=True) as (
        server,
        asked,
    ):
        reply = _post(f"{server.url}/v1/completions", body)
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            assert 'num_gpu_blocks="10"' in page.read().decode()
    assert reply["choices"][0]["text"] == "IS IT  GOOD ?"
    assert asked.prompts == [body["prompt"]]


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())
