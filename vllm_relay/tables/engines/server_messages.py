# SPDX-License-Identifier: Apache-2.0
"""What is sent to a server, and what its replies say: JSON of OpenAI's API with vLLM's additions.

Only vLLM holds answers to every constraint. Other servers are given JSON schemas; what else an
answer must be is known when it is parsed.
"""

from __future__ import annotations

import json
from typing import Any

from vllm_relay.tables.engines.base import Completion, Prompt
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

MAX_ERROR_CHARS = 300

# else vLLM takes those of the model's generation_config.json, and answers would depend on it
_NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ReplyError(ValueError):
    """A reply that is not of the API."""


def common_fields(model_name: str, question: Question, is_vllm: bool) -> dict[str, Any]:
    """Fields of the requests of all prompts of a question."""
    fields: dict[str, Any] = {
        "model": model_name,
        "max_tokens": question.most_tokens,
        "temperature": question.temperature,
    }
    if question.seed is not None:
        fields["seed"] = question.seed
    if is_vllm:
        fields |= _NEUTRAL_SAMPLING
        if question.output.constraint:
            fields["structured_outputs"] = question.output.constraint
    elif question.output.type == "json":
        fields["response_format"] = _response_format(question.output)
    return fields


def prompt_fields(prompt: Prompt, is_chat: bool) -> dict[str, Any]:
    """Fields of the request of one prompt.

    Raises:
        ValueError: tokens are to be sent, but the prompt has none.
    """
    # vLLM refuses prompts whose answer might end beyond the context
    length = {} if prompt.max_tokens is None else {"max_tokens": prompt.max_tokens}
    if is_chat:
        return {"messages": [{"role": "user", "content": prompt.message}], **length}
    if not prompt.token_ids:
        raise ValueError(
            f"prompt {prompt.number} has no token ids, expected those of the templated prompt: "
            "give them, or select mode='chat'"
        )
    return {"prompt": prompt.token_ids, **length}


def read_completion(number: int, reply: Any, is_chat: bool) -> Completion:
    """The answer to a prompt, or why the model gave none.

    Raises:
        ReplyError: the reply holds no answer, or one that was broken off by the server.
    """
    try:
        choice = reply["choices"][0]
        message = choice["message"] if is_chat else choice
        text = message["content" if is_chat else "text"]
        usage = reply.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        completion = Completion(
            number=number,
            text=text or "",
            num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
            num_cached_tokens=int(cached or 0),
            num_output_tokens=int(usage.get("completion_tokens") or 0),
            is_cut=choice.get("finish_reason") == "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ReplyError(f"{_shortened(str(reply))!r} is no reply of the API") from None
    finish_reason = choice.get("finish_reason")
    if finish_reason in ("abort", "error"):
        raise ReplyError(f"the server broke the answer off: finish_reason is {finish_reason!r}")
    error = ""
    if is_chat and message.get("refusal"):
        error = f"the model refused: {_shortened(str(message['refusal']))}"
    elif finish_reason == "content_filter":
        error = "the server's content filter held the answer back"
    elif not isinstance(text, str):
        error = f"the reply has no text, finish_reason is {finish_reason!r}"
        if completion.is_cut:
            error += ": give more max_tokens"
    if not error:
        return completion
    return Completion(
        number,
        error=error,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
        is_cut=completion.is_cut,
    )


def error_message(page: bytes) -> str:
    """What the page of an error says, shortened."""
    text = page.decode(errors="replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return _shortened(text)
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shortened(found if isinstance(found, str) else json.dumps(found))


def _response_format(output: Output) -> dict[str, Any]:
    if not output.schema_json:
        return {"type": "json_object"}
    schema = json.loads(output.schema_json)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
