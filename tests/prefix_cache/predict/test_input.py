# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_relay.arguments import CommandLineError
from vllm_relay.prefix_cache.predict.input import (
    InputLine,
    LineError,
    check_vocabulary,
    read_lines,
    to_requests,
)


def write(folder: Path, *values: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def trace(hash_ids: list[int], input_length: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": 7, "hash_ids": hash_ids, "input_length": input_length, **more}


def test_every_format_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    path = write(
        tmp_path,
        "a text",
        {"prompt": "another", "max_tokens": 3},
        {"prompt": "like OpenAI's", "max_completion_tokens": 5},
        {"messages": chat, "output_tokens": 4, "model": "is ignored"},
        {"prompt_token_ids": [5, 6], "cache_salt": "a secret"},
        trace([9], 2, output_length=8),
        {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "is ignored", "messages": chat, "max_tokens": 6},
        },
    )
    path.write_text("\ufeff" + path.read_text() + "\n  \n")  # begins as files of Windows do
    assert read_lines(path) == [
        InputLine(1, text="a text"),
        InputLine(2, text="another", output_tokens=3),
        InputLine(3, text="like OpenAI's", output_tokens=5),
        InputLine(4, messages=chat, output_tokens=4),
        InputLine(5, token_ids=[5, 6], cache_salt="a secret"),
        InputLine(6, token_ids=[9, 9], output_tokens=8, synthetic=True, timestamp=7),
        InputLine(7, messages=chat, output_tokens=6),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "given 7, expected a line of JSON: "),
        ({"prompt": "x", "max_token": 9}, "given max_token, expected the length of the answer as"),
        ({"text": "x"}, r"given the fields \['text'\], expected a line of JSON: "),
        ({"prompt": "x", "messages": []}, "given prompt and messages, expected a line of JSON: "),
        ({"prompt": ["x"]}, r"prompt: given \['x'\], expected a text"),
        ({"messages": "x"}, "messages: given 'x', expected a list"),
        ({"messages": []}, r"messages: given \[\], expected a list"),
        ({"prompt_token_ids": []}, r"prompt_token_ids: given \[\], expected a list of ids"),
        ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids: given \[1, -1\], expected"),
        ({"prompt_token_ids": [1.5]}, r"prompt_token_ids: given \[1.5\], expected"),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids: given \[True\], expected"),
        (
            {"prompt_token_ids": [2**63]},
            r"prompt_token_ids: given \[9223372036854775808\], expected",
        ),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: given 0, expected an integer from 1"),
        ({"prompt": "x", "output_tokens": "4"}, "output_tokens: given '4', expected an integer"),
        (
            {"prompt": "x", "output_tokens": 4, "max_tokens": 4},
            "given output_tokens and max_tokens, expected one",
        ),
        (
            {"prompt": "x", "cache_salt": 5},
            "cache_salt: given 5, expected a text that is not",
        ),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt: given '', expected a text that is not e"),
        ({"hash_ids": [1]}, "input_length: given None, expected 1 to 512"),
        (trace([1, 2], 512), "input_length: given 512, expected 513 to 1024"),
        (trace([1, 2], 1025), "input_length: given 1025, expected 513 to 1024"),
        ({"hash_ids": "1"}, "hash_ids: given '1', expected a list of ids"),
        ({"url": "/v1/completions", "body": 5}, r"given the fields \['url', 'body'\], expected"),
        (
            {"url": "/v1/embeddings", "body": {"input": "x"}},
            r"given the fields \['url', 'body', 'input'\], expected",
        ),
    ],
)
def test_bad_lines_are_refused_by_number(value: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "fine", value)
    with pytest.raises(LineError, match=f"line 2: {message}") as error:
        read_lines(path)
    assert error.value.number == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'prompt': 1}", "given \"{'prompt': 1}\" (Expecting property name"),
        (b'{"prompt": "a" "b"}', "(Expecting ',' delimiter), expected a line of JSON: "),
        (b"[" * 1_000_000, "given '[[["),
        (b"\x1f\x8b\x08\x00", "given bytes that are no UTF-8 (invalid start byte at byte 2 of"),
        ('{"prompt": "é"}'.encode("latin-1"), "byte 13 of the line), expected a JSON Lines file"),
        (b"\0\0", "given '\\x00\\x00' (Expecting value), expected a line of JSON: "),
    ],
)
def test_what_is_not_json_is_refused_by_number(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'"fine"\n\n' + line + b"\n")
    with pytest.raises(LineError, match=re.escape(message)) as error:
        read_lines(path)
    assert error.value.number == 3
    assert "\n" not in error.value.message


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    for path, reason in [(missing, "No such file or directory"), (tmp_path, "Is a directory")]:
        message = f"{path}: cannot be read ({reason}), expected a JSON Lines file: check the path"
        with pytest.raises(CommandLineError, match=re.escape(message)):
            read_lines(path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(content)
    message = f"{path}: given no requests, expected a line of JSON: "
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lines(path)


def test_synthetic_tokens_agree_where_hash_ids_do(tmp_path: Path) -> None:
    path = write(tmp_path, trace([1, 2, 3], 1500), trace([1, 2, 4], 1100), trace([5, 2], 1024))
    a, b, c = (line.token_ids for line in read_lines(path))
    assert a is not None and b is not None and c is not None
    assert [len(a), len(b), len(c)] == [1500, 1100, 1024]
    assert a[:1024] == b[:1024]
    assert all(x != y for x, y in zip(a[1024:], b[1024:], strict=False))
    assert all(x != y for x, y in zip(a[:512], c[:512], strict=False))


def test_lengths_of_answers_come_from_the_line_then_the_option_then_vllm() -> None:
    lines = [InputLine(1, token_ids=[1], output_tokens=9), InputLine(2, token_ids=[2])]
    assert [r.output_tokens for r in to_requests(lines, 5)] == [9, 5]
    assert [r.output_tokens for r in to_requests(lines, None)] == [9, 16]


def test_salts_stay_with_their_requests() -> None:
    lines = [InputLine(1, token_ids=[1], cache_salt="a"), InputLine(2, token_ids=[1])]
    assert [r.cache_salt for r in to_requests(lines, None)] == ["a", None]


def test_prompts_are_encoded() -> None:
    lines = [InputLine(1, text="abc"), InputLine(2, messages=[{"content": "de"}])]
    requests = to_requests(
        lines, None, lambda text: [len(text)], lambda messages: [len(messages[0]["content"])] * 2
    )
    assert [r.prompt_token_ids for r in requests] == [[3], [2, 2]]


def test_prompts_that_cannot_be_encoded_are_refused_by_number() -> None:
    def no_template(messages: Any) -> list[int]:
        raise RuntimeError("no chat\ntemplate")

    lines = [InputLine(4, messages=[{}])]
    with pytest.raises(LineError, match="line 4: cannot be tokenized: no chat template"):
        to_requests(lines, None, None, no_template)
    with pytest.raises(
        LineError, match="line 4: given text, expected token ids .*--model: give it"
    ):
        to_requests(lines, None)
    with pytest.raises(LineError, match="line 4: given a prompt without tokens"):
        to_requests(lines, None, None, lambda messages: [])


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    check_vocabulary(
        [InputLine(1, token_ids=[9]), InputLine(2, token_ids=[99], synthetic=True)], 10
    )
    with pytest.raises(LineError, match="line 3: given token id 10, expected at most 9"):
        check_vocabulary([InputLine(3, token_ids=[1, 10])], 10)
