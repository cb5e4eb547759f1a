# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's API that answers by rule, and what its prefix cache would find."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tables.engines.server.fake_server import FakeServer, Reply, fake_server
from vllm_relay.tables.ordering import BlockCache, TokenSequences, cached_tokens

BLOCK_SIZE_TOKENS = 16
_MANY_BLOCKS = 1 << 24
_MAX_MODEL_LEN_TOKENS = 8192


@dataclass
class Asked:
    """What a server was asked: the tokens of prompts in the order in which they came."""

    prompts: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def num_found_tokens(self, num_blocks: int | None) -> int:
        """What a cache of so many blocks, empty at first, finds of them; None has no limit."""
        cache = BlockCache(BLOCK_SIZE_TOKENS, num_blocks)
        return int(cached_tokens(TokenSequences.from_lists(self.prompts), cache).sum())


class _Behaviour:
    """Replies, and what they were to."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], str]) -> None:
        self.asked = Asked()
        self._tokenizer = tokenizer
        self._answer = answer

    def __call__(self, body: dict[str, Any]) -> Reply:
        is_chat = "messages" in body
        if is_chat:
            text = self._tokenizer.apply_chat_template(
                [_plain(message) for message in body["messages"]],
                add_generation_prompt=True,
                tokenize=False,
            )
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = body["prompt"]
            text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        self.asked.prompts.append(token_ids)
        answer = _in_format(self._answer(text), body.get("response_format"))
        choice = {"index": 0, "finish_reason": "stop", "text": answer}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": answer}
        return Reply(
            {
                "id": f"reply-{len(self.asked.prompts)}",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
                "usage": {
                    "prompt_tokens": len(token_ids),
                    "completion_tokens": 1,
                    "total_tokens": len(token_ids) + 1,
                },
            },
            headers={"Content-Type": "application/json"},
        )


def _plain(message: dict[str, Any]) -> dict[str, str]:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}


def _in_format(answer: str, response_format: dict[str, Any] | None) -> str:
    """The answer in the object with one property that a JSON schema asks for, if one does."""
    if not response_format or response_format["type"] != "json_schema":
        return answer
    (name, schema), *_ = response_format["json_schema"]["schema"]["properties"].items()
    return json.dumps({name: int(answer) if schema.get("type") == "integer" else answer})


@contextmanager
def prefix_cache_server(
    folder: Path,
    tokenizer: Any,
    answer: Callable[[str], str],
    *,
    num_blocks: int | None,
    is_vllm: bool,
) -> Iterator[tuple[FakeServer, Asked]]:
    """A server that runs, and what it has been asked.

    Args:
        folder: of the tokenizer.
        answer: to a prompt with the chat template around it.
        num_blocks: that it says its cache has; None says a number that nothing fills.
        is_vllm: whether it says that it is vLLM, and with it of its cache.
    """
    behaviour = _Behaviour(tokenizer, answer)
    model = {"id": "tiny", "owned_by": "other"}
    if is_vllm:
        model |= {
            "owned_by": "vllm",
            "root": str(folder),
            "max_model_len": _MAX_MODEL_LEN_TOKENS,
        }
    with fake_server(behaviour, model) as server:
        if is_vllm:
            # vLLM counts a block that it keeps back
            counted = (_MANY_BLOCKS if num_blocks is None else num_blocks) + 1
            server.metrics = (
                f'vllm:cache_config_info{{block_size="{BLOCK_SIZE_TOKENS}",'
                f'num_gpu_blocks="{counted}",enable_prefix_caching="True"}} 1.0\n'
            )
        yield server, behaviour.asked
