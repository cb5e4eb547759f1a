# SPDX-License-Identifier: Apache-2.0
"""What a router reads in the body of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.requests import (
    BLOCK_SIZE_TOKENS,
    BYTES_PER_TOKEN,
    MOST_EXPECTED_OUTPUT_TOKENS,
    RoutablePrompt,
    prompt_of,
)

BLOCK_BYTES = BLOCK_SIZE_TOKENS * BYTES_PER_TOKEN


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def chat(*contents: str) -> bytes:
    return body(messages=[{"role": "user", "content": each} for each in contents])


def common(left: bytes, right: bytes) -> int:
    """Blocks that two prompts begin with, both of them."""
    pairs = list(zip(prompt_of(left).chain, prompt_of(right).chain, strict=False))
    depth = 0
    while depth < len(pairs) and pairs[depth][0] == pairs[depth][1]:
        depth += 1
    assert all(one != other for one, other in pairs[depth:]), "a block tells all before it"
    return depth


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300))
def test_prompts_have_the_blocks_in_common_that_their_texts_have(
    prefix: str, one: str, other: str
) -> None:
    texts = [json.dumps([prefix + end], ensure_ascii=False)[:-2].encode() for end in (one, other)]
    shared = 0
    while shared < min(map(len, texts)) and texts[0][shared] == texts[1][shared]:
        shared += 1
    found = common(body(prompt=prefix + one), body(prompt=prefix + other))
    if one != other:
        # the quote that ends the shorter one may agree or not
        assert shared // BLOCK_BYTES <= found <= (shared + 2) // BLOCK_BYTES


def test_a_chat_goes_on_with_the_blocks_that_it_had() -> None:
    first = chat("a long question " * 20)
    assert common(first, chat("a long question " * 20, "answer", "more")) >= 4
    assert common(first, chat("another question " * 20)) == 0


def test_what_is_no_part_of_the_prompt_changes_nothing() -> None:
    one = body(prompt="x" * 500, temperature=0.5, stream=True, max_tokens=4)
    assert prompt_of(one).chain == prompt_of(body(prompt="x" * 500)).chain


@pytest.mark.parametrize("field", ["model", "cache_salt", "tools", "system", "instructions"])
def test_what_comes_before_the_prompt_tells_prompts_apart(field: str) -> None:
    assert common(body(**{field: "a"}, prompt="x" * 500), body(prompt="x" * 500)) == 0


def test_pictures_count_by_what_they_show() -> None:
    def picture(data: str) -> bytes:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return body(messages=[{"role": "user", "content": [image, {"text": "y" * 500}]}])

    one = prompt_of(picture("A" * 100_000))
    assert one.prompt_tokens < 300
    assert one.chain == prompt_of(picture("A" * 100_000)).chain
    assert one.chain[4:] != prompt_of(picture("A" * 99_999 + "B")).chain[4:]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, MOST_EXPECTED_OUTPUT_TOKENS),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 5, "n": 2}, 10),
        ({"max_tokens": 10**9}, MOST_EXPECTED_OUTPUT_TOKENS),
        ({"max_tokens": 1, "n": 10**400}, 128),
        ({"max_tokens": -1, "n": "two"}, MOST_EXPECTED_OUTPUT_TOKENS),
    ],
)
def test_answers(given: dict[str, Any], expected: int) -> None:
    assert prompt_of(body(**given)).output_tokens == expected


@pytest.mark.parametrize(
    ("path", "has_output"),
    [
        ("/v1/chat/completions", True),
        ("/v1/messages", True),
        ("/v1/responses", True),
        ("/inference/v1/generate", True),
        ("/v1/chat/completions/render", False),
        ("/v1/messages/count_tokens", False),
        ("/v1/embeddings", False),
        ("/v2/embed", False),
        ("/score", False),
        ("/v1/rerank", False),
        ("/tokenize", False),
    ],
)
def test_what_generates_nothing_has_no_output(path: str, has_output: bool) -> None:
    asked = prompt_of(body(input="x" * 100, max_tokens=7), path)
    assert asked.prompt_tokens > 0
    assert asked.output_tokens == (7 if has_output else 0)


@pytest.mark.parametrize(
    "given", [b"", b"{", b"[1]", b"\xff\xfe", b"3", b"[" * 100_000, b'{"n":' * 10**5]
)
def test_what_is_no_request_asks_nothing(given: bytes) -> None:
    assert prompt_of(given) == RoutablePrompt((), 0, 0)


def test_half_a_character_is_text_too() -> None:
    assert prompt_of(b'{"prompt": "\\ud800"}').prompt_tokens > 0


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists) | st.dictionaries(
    st.sampled_from(["prompt", "messages", "max_tokens", "n"]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
))  # fmt: skip
def test_any_json_has_a_prompt(given: Any) -> None:
    prompt = prompt_of(json.dumps(given).encode())
    assert prompt.prompt_tokens >= 0 and prompt.output_tokens >= 0
    # the last token may be part of one, which completes no block
    assert prompt.prompt_tokens // BLOCK_SIZE_TOKENS - len(prompt.chain) in (0, 1)
