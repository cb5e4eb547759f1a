# SPDX-License-Identifier: Apache-2.0
"""Conversations as token ids, so that both engines get exactly the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from vllm_relay.demo.workload import Conversations, handbook_workload, ledger_workload

_QUESTION_ALLOWANCE_TOKENS = 64


@dataclass(frozen=True)
class WorkloadSizes:
    """How much is asked; `questions_per_prompt` counts the warm-up question too."""

    num_system_prompts: int
    system_prompt_tokens: int
    questions_per_prompt: int
    output_tokens: int


@dataclass(frozen=True)
class Request:
    """One prompt as tokens, the tokens that must follow it, if they are known, and its question."""

    prompt_token_ids: list[int]
    expected_token_ids: list[int] | None = None
    question: str = ""


def recall_requests(model: str, sizes: WorkloadSizes, seed: int) -> list[Request]:
    """Requests with known answers for a folder that `build_recall_model` wrote.

    Raises:
        ValueError: a size is out of its range.
    """
    workload = ledger_workload(
        num_system_prompts=sizes.num_system_prompts,
        system_prompt_tokens=sizes.system_prompt_tokens,
        questions_per_prompt=sizes.questions_per_prompt,
        output_tokens=sizes.output_tokens,
        seed=seed,
    )
    return tokenize(AutoTokenizer.from_pretrained(model), workload)


def general_requests(
    model: str,
    sizes: WorkloadSizes,
    seed: int,
    make_workload: Callable[..., list[Conversations]] = handbook_workload,
) -> list[Request]:
    """Requests for any model; system prompts are cut to the length asked for or possible.

    Args:
        make_workload: `handbook_workload`, or what takes the same arguments.

    Raises:
        OSError: `model` is neither a Hugging Face folder nor a hub id.
        ValueError: a size is out of its range or the model's context is too short.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    context_tokens = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    longest_prompt_tokens = context_tokens - sizes.output_tokens
    longest_prefix_tokens = longest_prompt_tokens - _QUESTION_ALLOWANCE_TOKENS
    if longest_prefix_tokens < 1:
        raise ValueError(
            f"{model} takes {context_tokens} tokens, too few for a question and "
            f"{sizes.output_tokens} output tokens: ask for fewer output tokens"
        )
    prefix_tokens = min(sizes.system_prompt_tokens, longest_prefix_tokens)
    workload = make_workload(
        num_system_prompts=sizes.num_system_prompts,
        system_prompt_words=prefix_tokens,
        questions_per_prompt=sizes.questions_per_prompt,
        seed=seed,
    )
    requests = tokenize(tokenizer, [_cut(tokenizer, c, prefix_tokens) for c in workload])
    return [
        replace(r, prompt_token_ids=r.prompt_token_ids[:longest_prompt_tokens]) for r in requests
    ]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, workload: Sequence[Conversations]
) -> list[Request]:
    """The questions of all system prompts taken in turn, as they would arrive at a server."""
    return [
        Request(
            _render(tokenizer, conversations, question.text),
            None
            if question.continuation is None
            else tokenizer.encode(question.continuation, add_special_tokens=False),
            question.text,
        )
        for turn in zip(*(c.questions for c in workload), strict=True)
        for conversations, question in zip(workload, turn, strict=True)
    ]


def _render(
    tokenizer: PreTrainedTokenizerBase, conversations: Conversations, question: str
) -> list[int]:
    messages = [{"role": "system", "content": conversations.system_prompt}]
    for asked, answer in conversations.examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question})
    if tokenizer.chat_template is not None:
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            return tokenizer.encode(text, add_special_tokens=False)
        except TemplateError:
            pass  # some chat templates refuse a system prompt
    return tokenizer.encode(f"{conversations.system_prompt}\n\n{question}\n")


def _cut(
    tokenizer: PreTrainedTokenizerBase, conversations: Conversations, max_tokens: int
) -> Conversations:
    token_ids = tokenizer.encode(
        conversations.system_prompt, add_special_tokens=False, verbose=False
    )
    return replace(conversations, system_prompt=str(tokenizer.decode(token_ids[:max_tokens])))
