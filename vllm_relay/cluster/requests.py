# SPDX-License-Identifier: Apache-2.0
"""What a router needs to know of a request, from its body as OpenAI's API has it: no tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from vllm_relay.cluster.replica_index import Block

BLOCK_SIZE_TOKENS = 16
BYTES_PER_TOKEN = 4
"""About what a token of a text takes."""

MOST_EXPECTED_OUTPUT_TOKENS = 256
"""Of an answer that may be longer: most end by themselves."""

_FIELDS = (
    *("model", "cache_salt", "tools", "system", "instructions", "prompt", "messages", "input"),
    *("query", "queries", "text_1", "documents", "text_2"),
)
"""What becomes a prompt, in the order in which it does."""

_MOST_CHOICES = 128
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_WITHOUT_OUTPUT = re.compile(
    ".*/(embed|embeddings|pooling|classify|score|generative_scoring|rerank"
    "|tokenize|detokenize|count_tokens|render|derender)"
)
# images and sound in base64: their content counts, not their length
_MEDIA = re.compile(rb'"[A-Za-z0-9+/=:;,._-]{1024,}"')


@dataclass(frozen=True)
class RoutablePrompt:
    """
    Attributes:
        chain: of its text the blocks of `BLOCK_SIZE_TOKENS`; each tells all before it.
        prompt_tokens: about.
        output_tokens: that its answer is expected to have.
    """

    chain: Sequence[Block]
    prompt_tokens: int
    output_tokens: int


def prompt_of(body: bytes, path: str = "/v1/completions") -> RoutablePrompt:
    """What the body of a request asks; of one that is no JSON object, nothing.

    Args:
        path: of its URL; embeddings, scores and the like have no output.
    """
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return RoutablePrompt((), 0, 0)
        parts = [request[name] for name in _FIELDS if name in request]
        rendered = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        return RoutablePrompt((), 0, 0)
    text = rendered.encode("utf-8", "surrogatepass")
    text = _MEDIA.sub(lambda found: _digest(found[0]).hexdigest().encode(), text)
    prompt_tokens = -(-len(text) // BYTES_PER_TOKEN)
    output_tokens = 0 if _WITHOUT_OUTPUT.fullmatch(path) else _output_tokens(request)
    return RoutablePrompt(_chain(text), prompt_tokens, output_tokens)


def _output_tokens(request: dict[str, Any]) -> int:
    given = [request[name] for name in _LIMITS if _is_count(request.get(name))]
    choices = request["n"] if _is_count(request.get("n")) else 1
    return min([*given, MOST_EXPECTED_OUTPUT_TOKENS]) * min(choices, _MOST_CHOICES)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _chain(text: bytes) -> list[Block]:
    size, so_far = BLOCK_SIZE_TOKENS * BYTES_PER_TOKEN, _digest(b"")
    chain = []
    for end in range(size, len(text) + 1, size):
        so_far.update(text[end - size : end])
        chain.append(int.from_bytes(so_far.digest(), "little"))
    return chain


def _digest(text: bytes) -> Any:
    return blake2b(text, digest_size=8)
