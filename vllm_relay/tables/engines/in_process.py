# SPDX-License-Identifier: Apache-2.0
"""vLLM's `LLM` in this process."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_relay.commands.prompts import render_conversations
from vllm_relay.modules.engine.requests import unsupported_reason, with_plan
from vllm_relay.tables.engines.base import (
    NUM_LOGPROBS,
    Completion,
    Completions,
    EngineError,
    Prompt,
    PromptShape,
    answer_in,
    deciding_tokens,
    most_answer_tokens,
    without_reasoning,
)
from vllm_relay.tables.engines.model_identity import model_identity
from vllm_relay.tables.images import ImageError, content_parts
from vllm_relay.tables.jobs.prompts.format import conversation
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question, RequestOptions
from vllm_relay.tables.texts import shortened
from vllm_relay.tables.tracing import trace_headers

_WINDOW_PER_RUNNING = 2
"""Requests handed over, per request that runs: so that none waits for the planner."""
_WARM_UP_PROMPTS = 16
_LEAST_MEASURED_S = 2.0


class InProcessEngine:
    """An `Engine` over a `vllm.LLM`.

    Args:
        llm: that generates text. It is used by one job at a time.

    Raises:
        ValueError: it has no tokenizer, or does not generate text.
    """

    _numbers = count()

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        config = llm.llm_engine.vllm_config
        if config.model_config.runner_type != "generate":
            raise ValueError(
                f"a model with runner {config.model_config.runner_type!r} given, expected one that "
                f"generates text"
            )
        if config.model_config.skip_tokenizer_init:
            raise ValueError("an LLM without a tokenizer given: leave skip_tokenizer_init out")
        self.model_name: str = config.model_config.served_model_name
        self.tokenizer = llm.get_tokenizer()
        self.max_model_len: int | None = config.model_config.max_model_len
        self.max_running: int = config.scheduler_config.max_num_seqs
        self.cache = _cache_of(config)
        self.reasons = bool(config.structured_outputs_config.reasoning_parser)
        self.modules_refusal = unsupported_reason(config)
        takes_images = config.model_config.is_multimodal_model
        self.images_refusal = None if takes_images else f"the model {self.model_name} takes none"
        self._reader = AnswerReader(_reasoning_parser(config, self.tokenizer), self.tokenizer)

    @cached_property
    def identity(self) -> str:
        """See `Engine`: files are read when somebody asks."""
        return model_identity(self.llm.llm_engine.vllm_config)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        return self._run(prompts, self._params(question), self._read(question), question)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        params, read = self._params(question), self._read(question)
        params.logprobs = NUM_LOGPROBS

        def read_scored(number: int, output: Any) -> Completion:
            return replace(read(number, output), first_logprobs=_first_logprobs(output))

        return self._run(prompts, params, read_scored, question)

    def _params(self, question: Question) -> SamplingParams:
        params = sampling_params(question)
        params.max_tokens = self.max_answer_tokens(question)
        return params

    def _read(self, question: Question) -> Callable[[int, Any], Completion]:
        if deciding_tokens(question, reasons=self.reasons) is not None:
            return partial(self._decided, question)
        return self._reader.read

    def max_answer_tokens(self, question: Question) -> int:
        """See `Engine`: with choices, as many as tell any two of them apart."""
        return most_answer_tokens(question, reasons=self.reasons)

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float:
        """Measured with tokens drawn at random; the prefix cache is emptied afterwards."""
        rng = random.Random(0)
        vocabulary = self._ordinary_tokens()
        params = sampling_params(question)
        params.max_tokens = max(shape.num_output_tokens, 1)
        # a text goes on as long as it is expected to
        params.ignore_eos = not question.output.constraint
        block_size = self.cache.block_size_tokens if self.cache is not None else 1
        num_tokens = shape.num_cached_tokens + max(shape.num_new_tokens, 1)
        shared = rng.choices(vocabulary, k=num_tokens)

        def prompts(count: int) -> Iterator[Prompt]:
            for number in range(count):
                num_shared = shape.num_shared_tokens(number, block_size)
                own = rng.choices(vocabulary, k=max(num_tokens - num_shared, 1))
                yield Prompt(number, "", shared[:num_shared] + own)

        def seconds(count: int) -> float:
            began_s = time.perf_counter()
            for completion in self._run(prompts(count), params, _completion):
                if completion.error:
                    raise EngineError(f"the speed cannot be measured: {completion.error}")
            return time.perf_counter() - began_s

        seconds(min(self.max_running, _WARM_UP_PROMPTS))
        count = self.max_running
        taken_s = seconds(count)
        while taken_s < _LEAST_MEASURED_S:
            count *= 4
            taken_s = seconds(count)
        self.llm.reset_prefix_cache()
        return count / taken_s

    def _run(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        read: Callable[[int, Any], Completion],
        question: Question | None = None,
    ) -> Completions:
        """
        Args:
            question: of the prompts; None where these are tokens alone.
        """
        engine = self.llm.llm_engine
        waiting = iter(prompts)
        headers = trace_headers() or None
        running: dict[str, int] = {}
        try:
            while True:
                while len(running) < _WINDOW_PER_RUNNING * self.max_running:
                    prompt = next(waiting, None)
                    if prompt is None:
                        break
                    request_id = f"table-{next(self._numbers)}"
                    # known before it is added: whatever ends this loop aborts it
                    running[request_id] = prompt.number
                    try:
                        request = self._request(prompt, params, question)
                        engine.add_request(request_id, *request, trace_headers=headers)
                    except (ValueError, VLLMValidationError) as error:
                        del running[request_id]
                        yield Completion(prompt.number, error=str(error))
                if not running:
                    return
                for output in engine.step():
                    number = running.get(output.request_id) if output.finished else None
                    if number is not None:
                        del running[output.request_id]
                        yield read(number, output)
        except EngineDeadError as error:
            running.clear()
            raise EngineError(f"vLLM's engine has died: {error}") from error
        finally:
            if running:
                # one that was interrupted may be dead as well
                with suppress(EngineDeadError):
                    engine.abort_request(list(running))

    def _decided(self, question: Question, number: int, output: Any) -> Completion:
        """With the whole text of the choice that a cut answer begins."""
        completion = _completion(number, output)
        if not completion.is_cut:
            return completion
        answer = question.output
        decided = answer.completed(completion.text)
        if decided is None:
            # vLLM holds characters back where those after them are not complete
            tokens = list(output.outputs[0].token_ids)
            decided = answer.completed(self.tokenizer.decode(tokens, skip_special_tokens=True))
        if decided is not None:
            return replace(completion, text=decided, is_cut=False)
        error = (
            f"answer {completion.text!r} was cut at the question's max_tokens, where it may go on "
            f"as several of the choices: give more"
        )
        return replace(completion, error=error)

    def _request(
        self, prompt: Prompt, params: SamplingParams, question: Question | None
    ) -> tuple[Any, SamplingParams]:
        """
        Raises:
            ValueError: an image is not there, or vLLM does not take it.
        """
        if question is not None and question.images is not None:
            parts = content_parts(prompt.message, question.images.store)
            return self._chat(parts, question.request), params
        if prompt.modules is None:
            return tokens_input(prompt.token_ids), params
        params = with_plan(params, prompt.modules, self.max_model_len)
        return tokens_input(prompt.modules.token_ids), params

    def _chat(self, parts: list[dict[str, Any]], request: RequestOptions) -> Any:
        """What vLLM makes of a message with images, as of one that a server gets.

        Raises:
            ImageError: it reads none there.
        """
        messages: Any = conversation(request.system_prompt, parts)
        renderer = self.llm.llm_engine.renderer
        told = request.chat_template_kwargs
        try:
            [rendered] = render_conversations(self.llm, renderer, [messages], told)
        except Exception as error:  # whoever reads images, or fetches them, has errors of its own
            raise ImageError(f"vLLM takes no such prompt: {error}") from error
        return rendered

    def _ordinary_tokens(self) -> list[int]:
        """Those that stand for text: others may begin an image, say."""
        size = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        return [token for token in range(min(size, len(self.tokenizer))) if token not in special]

    def close(self) -> None:
        """The LLM is its owner's."""


def sampling_params(question: Question) -> SamplingParams:
    """What vLLM is told of a question's answers.

    Raises:
        ValueError: a parameter of the question is none of vLLM's, or out of its range.
    """
    constraint = question.output.constraint
    told = question.request.body
    if "vllm_xargs" in told:
        told["extra_args"] = told.pop("vllm_xargs")
    unknown = sorted(told.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ValueError(
            f"{unknown} given, which a model in this process does not know, expected parameters of "
            f"vLLM's SamplingParams; other fields are for servers"
        )
    return SamplingParams(
        max_tokens=question.most_tokens,
        temperature=question.temperature,
        seed=question.seed,
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **told,
    )


class AnswerReader:
    """What the model answers behind its reasoning.

    Args:
        parser: vLLM's of the model's reasoning; None looks for tags.
    """

    def __init__(self, parser: Any | None, tokenizer: Any) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    def read(self, number: int, output: Any) -> Completion:
        """The completion of vLLM's output for a prompt."""
        return without_reasoning(_completion(number, output), lambda _: self._answer(output))

    def _answer(self, output: Any) -> str | None:
        answer = output.outputs[0]
        if self._parser is None:
            return answer_in(answer.text)
        # by tokens: those that end the reasoning may be no part of the text
        token_ids = list(answer.token_ids)
        if self._parser.is_reasoning_end(token_ids):
            content = self._parser.extract_content_ids(token_ids)
            return self._tokenizer.decode(content, skip_special_tokens=True)
        if self._parser.is_reasoning_end(list(output.prompt_token_ids)):
            return answer_in(answer.text)
        return None


def _reasoning_parser(config: Any, tokenizer: Any) -> Any | None:
    name = config.structured_outputs_config.reasoning_parser
    return ReasoningParserManager.get_reasoning_parser(name)(tokenizer) if name else None


def _completion(number: int, output: Any) -> Completion:
    answer = output.outputs[0]
    has_failed = answer.finish_reason in ("abort", "error")
    return Completion(
        number,
        text=answer.text,
        error=f"the engine ended the answer with {answer.finish_reason!r}" if has_failed else "",
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens or 0,
        num_output_tokens=len(answer.token_ids),
        is_cut=answer.finish_reason == "length",
    )


def _first_logprobs(output: Any) -> dict[str, float] | None:
    tokens = output.outputs[0].logprobs
    if not tokens:
        return None
    return {each.decoded_token or "": each.logprob for each in tokens[0].values()}


def _cache_of(config: Any) -> BlockCache | None:
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        return None
    num_blocks = cache.num_gpu_blocks
    return BlockCache(cache.block_size, num_blocks - 1 if num_blocks else None)


logger = logging.getLogger("vllm.relay")


class StartedEngine(InProcessEngine):
    """An `InProcessEngine` that owns its LLM."""

    def close(self) -> None:
        """End the model; its memory is free again. More calls do nothing."""
        self.llm.llm_engine.engine_core.shutdown()


def start_engine(model: str, **arguments: Any) -> StartedEngine:
    """
    Args:
        model: a folder or hub id.
        arguments: of ``vllm.LLM``; they win over relay's attention backend and scheduler.

    Raises:
        ValueError: vLLM refuses the model or an argument, or the model is not there.
    """
    try:
        return _started(model, arguments)
    except OSError as error:
        if Path(model).is_dir():
            raise
        # of the hub, which has other classes in each version
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"model {model!r} cannot be loaded ({reason}): give the folder of a Hugging Face "
            f"model, or the hub id of one that was downloaded or can be from here"
        ) from error


def _started(model: str, arguments: dict[str, Any]) -> StartedEngine:
    chosen = {"enable_prefix_caching": True, "attention_backend": "relay", **arguments}
    if arguments.get("otlp_traces_endpoint"):
        # vLLM's spans hold its statistics
        chosen.setdefault("disable_log_stats", False)
    if "scheduler_cls" not in arguments:
        given = arguments.get("additional_config") or {}
        chosen["additional_config"] = {"relay": {"scheduler": True}, **given}
    try:
        return StartedEngine(LLM(model, **chosen))
    except ValueError as error:
        refusal = _refusal(error)
        if refusal is None or "attention_backend" in arguments:
            raise
    logger.warning("vllm-relay: %s; %s starts with vLLM's own attention backend", refusal, model)
    del chosen["attention_backend"]
    return StartedEngine(LLM(model, **chosen))


def _refusal(error: ValueError) -> str | None:
    """Why relay cannot serve the model; None if it can, as far as the error tells."""
    # vLLM's configurations wrap the message of a RelayUnsupportedError in one of pydantic
    found = re.search(r"relay cannot serve .*?(?= \[type=|$)", str(error), re.MULTILINE)
    return found and found[0]
