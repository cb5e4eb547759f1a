# SPDX-License-Identifier: Apache-2.0
"""Reading the requests of `vllm-relay predict`: prompts, chats, token ids or block-hash traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_relay.arguments import CommandLineError, is_integer, shortened

TRACE_BLOCK_TOKENS = 512  # of a hash id in Mooncake's traces
DEFAULT_OUTPUT_TOKENS = 16  # as SamplingParams.max_tokens

_EXPECTED = (
    'expected a line of JSON: {"prompt": TEXT}, {"messages": [...]}, {"prompt_token_ids": [...]}, '
    'a string, {"input_length": N, "hash_ids": [...]} or {"url": ..., "body": {...}} of a batch'
)
_MAX_ID = 2**63 - 1
_CONTENTS = ("prompt", "messages", "prompt_token_ids", "hash_ids")
_OUTPUT_FIELDS = ("output_tokens", "max_tokens", "max_completion_tokens", "output_length")

Message = dict[str, Any]


class LineError(ValueError):
    """A line of the file, numbered from 1, that is refused: what was given, what was expected."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"line {number}: {message}")
        self.number = number
        self.message = message


@dataclass(frozen=True)
class InputLine:
    """One line of the file; exactly one of text, messages and token_ids is not None."""

    number: int
    """From 1, for messages."""
    text: str | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    output_tokens: int | None = None
    """As the line says, None where it does not."""
    synthetic: bool = False
    """Whether token_ids stand for the hash ids of a trace, and are in no vocabulary."""
    timestamp: Any = None
    """As the line says, like the next; checked where arrivals are asked for."""
    arrival_s: Any = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class PredictedRequest:
    """What vLLM is asked to do."""

    line: int
    prompt_token_ids: list[int]
    output_tokens: int
    cache_salt: str | None = None
    """Requests share blocks only with those of their salt."""


def read_lines(path: Path) -> list[InputLine]:
    """Read and check a JSON Lines file; empty lines are skipped.

    Raises:
        LineError: a line is not what is expected.
        CommandLineError: the file cannot be read.
        ValueError: it is empty; the message names it.
    """
    lines = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip():
                        lines.append(_input_line(number, _json(line)))
                except ValueError as error:
                    raise LineError(number, str(error)) from None
    except OSError as error:
        raise CommandLineError(
            f"{path}: cannot be read ({error.strerror}), expected a JSON Lines file: check the path"
        ) from None
    if not lines:
        raise ValueError(f"{path}: given no requests, {_EXPECTED}, for each of them")
    return lines


def to_requests(
    lines: Sequence[InputLine],
    output_tokens: int | None,
    encode_text: Callable[[str], list[int]] | None = None,
    encode_chat: Callable[[list[Message]], list[int]] | None = None,
) -> list[PredictedRequest]:
    """Turn prompts into token ids and fill in the lengths of the answers.

    Args:
        output_tokens: of the lines that do not say; None for vLLM's default.
        encode_text: tokenizes a prompt; may be None where all lines hold token ids.
        encode_chat: applies the chat template and tokenizes; likewise.

    Raises:
        LineError: a prompt is empty or cannot be encoded.
    """
    default = DEFAULT_OUTPUT_TOKENS if output_tokens is None else output_tokens
    requests = []
    for line in lines:
        token_ids = line.token_ids
        try:
            if line.text is not None and encode_text is not None:
                token_ids = encode_text(line.text)
            elif line.messages is not None and encode_chat is not None:
                token_ids = encode_chat(line.messages)
        except Exception as error:  # whatever a chat template raises
            reason = " ".join(str(error).split())
            raise LineError(line.number, f"cannot be tokenized: {reason}") from error
        if token_ids is None:
            raise LineError(
                line.number,
                "given text, expected token ids or hash ids where there is no --model: give it",
            )
        if not token_ids:
            raise LineError(line.number, "given a prompt without tokens, expected at least 1")
        wanted = default if line.output_tokens is None else line.output_tokens
        requests.append(PredictedRequest(line.number, token_ids, wanted, line.cache_salt))
    return requests


def check_vocabulary(lines: Sequence[InputLine], vocab_size: int) -> None:
    """Refuse token ids that the model does not have, as vLLM does: a LineError for the first."""
    for line in lines:
        if line.token_ids is not None and not line.synthetic and max(line.token_ids) >= vocab_size:
            raise LineError(
                line.number,
                f"given token id {max(line.token_ids)}, expected at most {vocab_size - 1}, where "
                "the model's vocabulary ends: give the --model that the file is for",
            )


def _json(line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"given bytes that are no UTF-8 ({error.reason} at byte {error.start + 1} of the line)"
            ", expected a JSON Lines file: unpack it, or convert it to UTF-8"
        ) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"given {shortened(text)} ({reason}), {_EXPECTED}") from None


def _input_line(number: int, value: Any) -> InputLine:
    if isinstance(value, str):
        return InputLine(number, text=value)
    if isinstance(value, dict) and "url" in value and isinstance(value.get("body"), dict):
        value = {**value, **value["body"]}  # of an OpenAI batch, as `vllm run-batch` reads it
    if not isinstance(value, dict):
        raise ValueError(f"given {shortened(value)}, {_EXPECTED}")
    given = [name for name in _CONTENTS if name in value]
    if len(given) != 1:
        what = " and ".join(given) or f"the fields {shortened(list(value))}"
        raise ValueError(f"given {what}, {_EXPECTED}")
    (kind,) = given
    content = value[kind]
    make_line = partial(
        InputLine,
        number,
        output_tokens=_output_tokens(value),
        timestamp=value.get("timestamp"),
        arrival_s=value.get("arrival_s"),
        cache_salt=_cache_salt(value.get("cache_salt")),
    )
    if kind == "prompt":
        if not isinstance(content, str):
            raise ValueError(f"prompt: given {shortened(content)}, expected a text")
        return make_line(text=content)
    if kind == "messages":
        if not _is_list_of(content, dict) or not content:
            raise ValueError(
                f"messages: given {shortened(content)}, expected a list of "
                '{"role": ..., "content": ...}'
            )
        return make_line(messages=content)
    if not _is_list_of(content, int) or not content or min(content) < 0 or max(content) > _MAX_ID:
        raise ValueError(
            f"{kind}: given {shortened(content)}, expected a list of ids from 0 to {_MAX_ID}"
        )
    if kind == "prompt_token_ids":
        return make_line(token_ids=content)
    tokens = _synthetic_tokens(content, value.get("input_length"))
    return make_line(token_ids=tokens, synthetic=True)


def _synthetic_tokens(hash_ids: list[int], input_length: Any) -> list[int]:
    """Token ids that agree up to the end of a block exactly where the hash ids do.

    All tokens of a block are its hash id, so blocks of every size tell prefixes apart.
    """
    longest = len(hash_ids) * TRACE_BLOCK_TOKENS
    shortest = longest - TRACE_BLOCK_TOKENS + 1
    if not is_integer(input_length) or not shortest <= input_length <= longest:
        raise ValueError(
            f"input_length: given {shortened(input_length)}, expected {shortest} to {longest}, "
            f"since each of the {len(hash_ids)} hash_ids stands for {TRACE_BLOCK_TOKENS} tokens"
        )
    tokens: list[int] = []
    for hash_id in hash_ids:
        tokens.extend([hash_id] * TRACE_BLOCK_TOKENS)
    del tokens[input_length:]
    return tokens


def _output_tokens(value: dict[str, Any]) -> int | None:
    for name in value:
        if name.startswith("max_") and name not in _OUTPUT_FIELDS:
            raise ValueError(
                f"given {name}, expected the length of the answer as one of "
                f"{', '.join(_OUTPUT_FIELDS)}"
            )
    given = {name: value[name] for name in _OUTPUT_FIELDS if value.get(name) is not None}
    if len(given) > 1:
        raise ValueError(f"given {' and '.join(given)}, expected one of them")
    for name, count in given.items():
        if not is_integer(count) or count < 1:
            raise ValueError(f"{name}: given {shortened(count)}, expected an integer from 1")
        return count
    return None


def _cache_salt(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"cache_salt: given {shortened(value)}, expected a text that is not empty")
    return value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
