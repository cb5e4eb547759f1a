# SPDX-License-Identifier: Apache-2.0
"""What is sent to a server and what it replies: JSON of OpenAI's API with vLLM's additions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from vllm_relay.tables.engines.base import UNFINISHED, Completion, Prompt, without_reasoning
from vllm_relay.tables.engines.server.dialect import Dialect
from vllm_relay.tables.images import content_parts, probe_parts
from vllm_relay.tables.jobs.prompts.format import conversation
from vllm_relay.tables.question import Question
from vllm_relay.tables.texts import shortened

_MAX_ERROR_CHARS = 300
# else vLLM takes those of the model's generation_config.json, and answers would depend on it
_NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PROBE = "Answer with one word: yes."
_PROBE_TOKENS = 8


class ReplyError(ValueError):
    """A reply that is not of the API."""


class Requests:
    """Requests of one question.

    Args:
        is_chat: whether messages are sent, not tokens. Images need messages.
        num_logprobs: of the first token of an answer, see `Completion.first_logprobs`.

    Attributes:
        has_images: whether prompts refer to images.
    """

    def __init__(
        self,
        model_name: str,
        question: Question,
        *,
        is_vllm: bool,
        is_chat: bool,
        num_logprobs: int = 0,
    ) -> None:
        self._question = question
        self.has_images = question.images is not None
        is_chat = self._is_chat = is_chat or self.has_images
        self._has_formats = is_chat and not is_vllm
        self._fields: dict[str, Any] = {"model": model_name, "temperature": question.temperature}
        if question.seed is not None:
            self._fields["seed"] = question.seed
        if is_vllm:
            self._fields |= _NEUTRAL_SAMPLING
            if question.output.constraint:
                self._fields["structured_outputs"] = question.output.constraint
        if num_logprobs:
            asked = {"logprobs": True, "top_logprobs": num_logprobs}
            self._fields |= asked if is_chat else {"logprobs": num_logprobs}
        request = question.request
        if is_chat and request.chat_template_kwargs:
            self._fields["chat_template_kwargs"] = request.chat_template_kwargs
        self._fields |= request.body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._is_chat else "/v1/completions"

    def body(self, prompt: Prompt, dialect: Dialect, *, is_probe: bool = False) -> dict[str, Any]:
        """The request of a prompt, or of a short one in its place that has no data.

        Raises:
            ImageError: the prompt refers to an image that is not there.
            ValueError: tokens are to be sent, but the prompt has none.
        """
        # vLLM refuses prompts whose answer might end beyond the context
        max_tokens = prompt.max_tokens or self._question.most_tokens
        body = {**self._fields, dialect.limit_name: max_tokens}
        if self._has_formats and (found := dialect.response_format(self._question.output)):
            body["response_format"] = found
        if self._is_chat:
            message = self._probe if is_probe else self._content(prompt.message)
            body["messages"] = conversation(self._question.request.system_prompt, message)
            return body
        if not prompt.token_ids:
            raise ValueError(
                f"prompt {prompt.number} has no token ids, expected those of the templated prompt: "
                "give them, or select mode='chat'"
            )
        body["prompt"] = prompt.token_ids[:_PROBE_TOKENS] if is_probe else prompt.token_ids
        return body

    def _content(self, message: str) -> str | list[dict[str, Any]]:
        images = self._question.images
        return message if images is None else content_parts(message, images.store)

    @property
    def _probe(self) -> str | list[dict[str, Any]]:
        return probe_parts(_PROBE) if self.has_images else _PROBE

    def after_refusal(self, dialect: Dialect, words: str) -> Dialect | None:
        """See `Dialect`."""
        found = dialect.after_refusal(words, self._question.output)
        is_useless = found is None or (found.format != dialect.format and not self._has_formats)
        return None if is_useless else found

    def read(self, number: int, reply: Any, dialect: Dialect) -> Completion:
        """The answer to a prompt, or why the model gave none.

        Raises:
            ReplyError: the reply holds no answer, or one that was broken off by the server.
        """
        completion = without_reasoning(read_completion(number, reply, self._is_chat))
        if completion.error or not self._has_formats:
            return completion
        text = dialect.unwrapped(completion.text, self._question.output)
        return replace(completion, text=text)


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
            first_logprobs=_first_logprobs(choice.get("logprobs"), is_chat),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ReplyError(
            f"{shortened(str(reply), _MAX_ERROR_CHARS)!r} is no reply of the API"
        ) from None
    finish_reason = choice.get("finish_reason", "stop")
    if finish_reason in (None, "abort", "error"):
        raise ReplyError(f"the server broke the answer off: finish_reason is {finish_reason!r}")
    error = ""
    if is_chat and message.get("refusal"):
        error = f"the model refused: {shortened(str(message['refusal']), _MAX_ERROR_CHARS)}"
    elif finish_reason == "content_filter":
        error = "the server's content filter held the answer back"
    elif is_chat and completion.is_cut and not text and _reasoning(message):
        error = UNFINISHED
    elif not isinstance(text, str):
        error = f"the reply has no text, finish_reason is {finish_reason!r}"
        if completion.is_cut:
            error += ": give more max_tokens"
    return replace(completion, text="", error=error) if error else completion


def _first_logprobs(found: Any, is_chat: bool) -> dict[str, float] | None:
    if not found:
        return None
    if is_chat:
        [first, *_] = found["content"] or [{"top_logprobs": []}]
        return {each["token"]: float(each["logprob"]) for each in first["top_logprobs"]}
    [first, *_] = found["top_logprobs"] or [{}]
    return {token: float(logprob) for token, logprob in (first or {}).items()}


def _reasoning(message: dict[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")


def error_message(page: bytes) -> str:
    """What the page of an error says, shortened."""
    text = page.decode(errors="replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return shortened(text, _MAX_ERROR_CHARS)
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    told = found if isinstance(found, str) else json.dumps(found)
    return shortened(told, _MAX_ERROR_CHARS)
