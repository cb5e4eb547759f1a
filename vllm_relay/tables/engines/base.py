# SPDX-License-Identifier: Apache-2.0
"""What a job asks of an engine, and what of a completion is the answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

if TYPE_CHECKING:
    from vllm_relay.modules.prompt.render import RenderedPrompt


class EngineError(RuntimeError):
    """The engine cannot go on: no prompt after this one has a chance."""


class JobOver(BaseException):
    """Raised where an engine asks for prompts that nobody waits for any more: it aborts what runs,
    and is raised again."""


@dataclass(frozen=True)
class Prompt:
    """
    Attributes:
        number: comes back with the completion.
        message: what the user says, before the chat template.
        token_ids: of the templated prompt; empty if the engine has no tokenizer.
        modules: the same with prompt modules, for an engine that takes them; None if it has none.
        max_tokens: of its answer, where the context has room for fewer than the question's.
    """

    number: int
    message: str
    token_ids: list[int]
    modules: RenderedPrompt | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """
    Attributes:
        number: of the prompt.
        text: of the answer.
        error: why there is no answer; "" if there is one.
        num_prompt_tokens: as the engine counts.
        num_cached_tokens: of the prompt, found in the engine's prefix cache.
        num_output_tokens: of the answer, its end included.
        is_cut: whether the answer ended at the engine's `max_answer_tokens`.
        first_logprobs: of `generate_scored`: what the first token of the answer might be, and the
            logarithm of its probability, of the likeliest ones.
    """

    number: int
    text: str = ""
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_cut: bool = False
    first_logprobs: Mapping[str, float] | None = None


Completions: TypeAlias = Generator[Completion, None, None]

NUM_LOGPROBS = 20
"""Of `Completion.first_logprobs`, as many as vLLM and OpenAI's API give by default."""


@dataclass(frozen=True)
class PromptShape:
    """An average prompt.

    Attributes:
        num_cached_tokens: that the prefix cache has.
        num_new_tokens: of the prompt that it has not.
        num_output_tokens: of the answer.
    """

    num_cached_tokens: int
    num_new_tokens: int
    num_output_tokens: int

    def num_shared_tokens(self, number: int, block_size_tokens: int) -> int:
        """What the prompt of this number shares: whole blocks, as only these are cached, and
        `num_cached_tokens` on average of all numbers."""
        shared = self.num_cached_tokens
        before, after = (each * shared // block_size_tokens for each in (number, number + 1))
        return (after - before) * block_size_tokens


class Engine(Protocol):
    """An engine may also have attributes ``modules_refusal`` and ``images_refusal``: None if it
    takes prompts with modules or with references to images, else the reason why it does not; and
    ``reasons``: whether answers begin with a reasoning of any length; ``model_name``; and a method
    ``generate_scored``: `generate` with `Completion.first_logprobs`.

    Attributes:
        identity: the model and what else changes answers but is no part of a question.
        tokenizer: of the model, a Hugging Face tokenizer; None if there is none at hand: token
            counts are then estimates.
        cache: the prefix cache; None if it is not known.
        max_model_len: in tokens, a prompt and its answer; None if it is not known.
    """

    @property
    def identity(self) -> str: ...
    @property
    def tokenizer(self) -> Any | None: ...
    @property
    def cache(self) -> BlockCache | None: ...
    @property
    def max_model_len(self) -> int | None: ...

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """Answer prompts, in their order as far as the engine follows it.

        Prompts are taken when there is room for them. Where there are no more, more are asked for
        as long as some run: an iterator that has ended may go on. A prompt that the engine refuses
        has a completion with an error. Closing the generator aborts what runs.

        Raises:
            EngineError: the engine is gone.
        """
        ...

    def max_answer_tokens(self, question: Question) -> int:
        """As many as `generate` has for an answer: the question's `max_tokens`, or fewer where
        these are enough to know it."""
        ...

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        """How many such prompts run in a second, measured; None if that would cost something."""
        ...

    def close(self) -> None:
        """Let go of the engine, if it was started for this."""
        ...


def generate(
    engine: Engine, prompts: Iterable[Prompt], question: Question, *, is_scored: bool = False
) -> Completions:
    """`Engine.generate`, or with `Completion.first_logprobs` where the engine has them."""
    scored: Callable[..., Completions] = getattr(engine, "generate_scored", engine.generate)
    return (scored if is_scored else engine.generate)(prompts, question)


def modules_refusal(engine: Engine) -> str | None:
    """Why an engine takes no prompts with modules; None if it does."""
    return getattr(engine, "modules_refusal", "prompt modules run in vLLM in this process only")


def images_refusal(engine: Engine) -> str | None:
    """Why an engine takes no prompts with images; None if it does."""
    return getattr(engine, "images_refusal", "this engine takes none")


UNFINISHED = "the model was still reasoning where its answer was cut: give more max_tokens"

_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))

ReadAnswer: TypeAlias = "Callable[[str], str | None]"


def answer_in(text: str) -> str | None:
    """What follows the reasoning, or the text if there is none; None if the reasoning has no end.

    Chat templates may hold the tag that begins it, so that a text begins within.
    """
    for begin, end in _TAGS:
        before, found, answer = text.partition(end)
        if found and (begin not in text or before.lstrip().startswith(begin)):
            return answer
        if text.lstrip().startswith(begin):
            return None
    return text


def without_reasoning(completion: Completion, read: ReadAnswer = answer_in) -> Completion:
    """With what follows the reasoning as its text, or an error if nothing does."""
    if completion.error:
        return completion
    answer = read(completion.text)
    if answer is None:
        return replace(completion, text="", error=UNFINISHED)
    return replace(completion, text=answer)


def deciding_tokens(question: Question, *, reasons: bool) -> int | None:
    """As many as tell any two of a question's choices apart; None if it has none, or if the model
    reasons: it is held to the choices only afterwards."""
    return None if reasons else question.output.num_deciding_tokens


def most_answer_tokens(question: Question, *, reasons: bool) -> int:
    """Those that vLLM is told to write at most: the question's, or those that decide."""
    enough = deciding_tokens(question, reasons=reasons)
    return question.most_tokens if enough is None else min(enough, question.most_tokens)
