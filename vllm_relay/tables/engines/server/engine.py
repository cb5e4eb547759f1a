# SPDX-License-Identifier: Apache-2.0
"""A server that answers prompts: vLLM, or any other with OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, get_args

from vllm_relay.tables.engines.addresses import ServerKey
from vllm_relay.tables.engines.base import (
    NUM_LOGPROBS,
    Completion,
    Completions,
    EngineError,
    Prompt,
    PromptShape,
)
from vllm_relay.tables.engines.server.admission import Admission
from vllm_relay.tables.engines.server.client import MODELS_PATH, ServerClient
from vllm_relay.tables.engines.server.dialect import Dialect
from vllm_relay.tables.engines.server.http import (
    HttpClient,
    LoopThread,
    RequestFailed,
    RequestRefused,
    RetryPolicy,
    ServerAddress,
    ServerAway,
    loop_in_thread,
    open_http_client,
)
from vllm_relay.tables.engines.server.messages import Requests
from vllm_relay.tables.engines.server.models import (
    TOKENIZER_PROBE,
    ServedModel,
    TokenizerError,
    block_cache,
    checked_tokenizer,
    choose_model,
    num_data_parallel_ranks,
    served_models,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question
from vllm_relay.tables.tracing import trace_headers

logger = logging.getLogger("vllm.relay")

Mode = Literal["auto", "completions", "chat"]

DEFAULT_MAX_RUNNING = 64
DEFAULT_TIMEOUT_S = 600.0

_START_TIMEOUT_S = 60.0
_WAIT_WITH_ROOM_S = 0.1


@dataclass(frozen=True)
class _Server:
    """What a server says of itself when a job starts.

    Attributes:
        num_ranks: data-parallel engines behind it; 0 if it does not say.
        probe_token_ids: its tokens of `TOKENIZER_PROBE`; None if it does not say.
    """

    model: ServedModel
    cache: BlockCache | None
    num_ranks: int
    probe_token_ids: list[int] | None


class ServerEngine:
    """An `Engine` over HTTP.

    vLLM is sent the tokens of prompts (mode "completions"), so that it computes exactly those that
    were planned. Other servers are sent messages (mode "chat"), as is vLLM if its tokenizer is not
    at hand, and for prompts with images in any mode.

    A server that is away, or turns requests away, is waited for. When it is back it must have the
    same model. One that refuses every prompt ends the job after a few of them. What it takes is
    learned from what it refuses, see `Dialect`.

    `identity` consists of the model's name, where the server has it from and the mode: other
    weights under the same name are not noticed.

    Args:
        base_url: with or without /v1.
        model: its name; None takes the only one that the server has.
        api_key: None sends none. It is sent nowhere else, proxies of the environment excepted.
        api_key_over_http: whether it may be sent to another machine without encryption.
        tokenizer: of the model: a folder, a name on the Hugging Face hub, or a tokenizer; None
            loads it from where the server has the model from.
        max_running: prompts that the server has at once.
        timeout_s: of a request, the time that it waits in the server included.
        mode: "auto" chooses as above.
        retries: None has `RetryPolicy`'s defaults.
        data_parallel_rank: of ``vllm serve --data-parallel-size N``, which of its engines, from 0
            to N - 1, gets all prompts; None leaves it to the server.

    Raises:
        EngineError: the server does not answer, or not as expected.
        ValueError: an argument is out of its range, the model is not there or one of several, or
            the tokenizer is not the model's, or the key would be sent in the open.
    """

    images_refusal: str | None = None

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | ServerKey | None = None,
        api_key_over_http: bool = False,
        tokenizer: str | Path | Any | None = None,
        max_running: int = DEFAULT_MAX_RUNNING,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        mode: Mode = "auto",
        retries: RetryPolicy | None = None,
        data_parallel_rank: int | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} given, expected one of {list(get_args(Mode))}")
        if max_running < 1:
            raise ValueError(f"max_running={max_running} given, expected at least 1")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} given, expected a number above 0")
        key = api_key if isinstance(api_key, ServerKey) else ServerKey(api_key)
        self._address = ServerAddress.of(
            base_url,
            key,
            key_over_http=api_key_over_http,
            data_parallel_rank=data_parallel_rank,
        )
        self._timeout_s = timeout_s
        self._retries = retries or RetryPolicy()
        self._dialect = Dialect()
        with loop_in_thread() as loop:
            server = loop.run(_ask_server(self._address, model))
        if data_parallel_rank is not None:
            _check_rank(server, data_parallel_rank, base_url)
        self._model = server.model
        self.model_name = server.model.name
        self.cache = server.cache
        self.max_model_len = server.model.max_model_len
        self.max_running = max_running
        self.tokenizer = _choose_tokenizer(server, tokenizer, mode)
        self.mode: Mode = mode
        if mode == "auto":
            sends_tokens = server.model.is_vllm and self.tokenizer is not None
            self.mode = "completions" if sends_tokens else "chat"
        # the same message may become another prompt
        self.identity = f"{server.model.identity} {self.mode}"

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """As `Engine.generate`; completions come as they are ready.

        A prompt that fails again and again, though the server is there, has a completion with an
        error. Beyond `max_running`, a quarter as many prompts are taken ahead of time.

        Raises:
            EngineError: the server is gone, lets nobody in or refuses everything; the job can be
                resumed.
            ValueError: a prompt has no tokens in mode "completions".
        """
        return self._generate(prompts, question, 0)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`; other servers than vLLM put the answer into JSON, or refuse to say."""
        return self._generate(prompts, question, NUM_LOGPROBS if self._model.is_vllm else 0)

    def _generate(
        self, prompts: Iterable[Prompt], question: Question, num_logprobs: int
    ) -> Completions:
        max_outstanding = self.max_running + max(1, self.max_running // 4)
        source = iter(prompts)
        answers: SimpleQueue[Future[Completion]] = SimpleQueue()
        num_outstanding = 0
        with loop_in_thread() as loop, self._open_client(loop, question, num_logprobs) as client:
            while True:
                for prompt in islice(source, max_outstanding - num_outstanding):
                    loop.start(client.answer(prompt)).add_done_callback(answers.put)
                    num_outstanding += 1
                    if not answers.empty():
                        break
                if not num_outstanding:
                    return
                # prompts that came meanwhile may have room
                has_room = num_outstanding < max_outstanding
                try:
                    answer = answers.get(timeout=_WAIT_WITH_ROOM_S if has_room else None)
                except Empty:
                    continue
                if answer.exception() is not None:
                    # what was answered until then is not asked again
                    yield from _answered(answers)
                num_outstanding -= 1
                yield answer.result()

    def max_answer_tokens(self, question: Question) -> int:
        """The question's: a server's model may reason before it keeps to the choices."""
        return question.most_tokens

    def prompts_per_s(self, shape: PromptShape, question: Question) -> None:
        """Not measured: others may use the server, and its owner may count tokens."""

    def close(self) -> None:
        """Nothing is held between calls of `generate`."""

    @contextmanager
    def _open_client(
        self, loop: LoopThread, question: Question, num_logprobs: int
    ) -> Iterator[ServerClient]:
        model, retries = self._model, self._retries
        is_chat = self.mode == "chat"
        headers = trace_headers()
        requests = Requests(
            model.name,
            question,
            is_vllm=model.is_vllm,
            is_chat=is_chat,
            num_logprobs=num_logprobs,
        )

        async def opened() -> tuple[ServerClient, AsyncExitStack]:
            async with AsyncExitStack() as cleanup:
                http = open_http_client(self._address, self._timeout_s, headers)
                client = ServerClient(
                    await cleanup.enter_async_context(http),
                    model,
                    requests,
                    Admission(self.max_running, retries),
                    retries,
                    self._dialect,
                )
                return client, cleanup.pop_all()

        client, cleanup = loop.run(opened())
        try:
            yield client
        finally:
            self._dialect = replace(self._dialect, limit_name=client.dialect.limit_name)
            loop.cancel_all()
            loop.run(cleanup.aclose())


def _answered(answers: SimpleQueue[Future[Completion]]) -> Iterator[Completion]:
    while not answers.empty():
        answer = answers.get()
        if answer.exception() is None:
            yield answer.result()


async def _ask_server(address: ServerAddress, model_name: str | None) -> _Server:
    async with open_http_client(address, _START_TIMEOUT_S) as http:
        try:
            models = served_models(await http.get_json(MODELS_PATH))
        except (ServerAway, RequestFailed, RequestRefused, ValueError) as error:
            raise EngineError(
                f"{address.root_url}{MODELS_PATH} does not answer as expected: {error}: give the "
                "address of a server with OpenAI's API that runs"
            ) from error
        model = choose_model(models, model_name)
        if not model.is_vllm:
            return _Server(model, None, 0, None)
        metrics = await _metrics(http)
        probe_token_ids = await _probe_token_ids(http, model.name)
        return _Server(
            model, block_cache(metrics), num_data_parallel_ranks(metrics), probe_token_ids
        )


async def _metrics(http: HttpClient) -> str:
    try:
        return (await http.get("/metrics")).decode(errors="replace")
    except (EngineError, ServerAway, RequestFailed, RequestRefused):
        return ""


async def _probe_token_ids(http: HttpClient, model_name: str) -> list[int] | None:
    body = {"model": model_name, "prompt": TOKENIZER_PROBE, "add_special_tokens": False}
    try:
        return (await http.post_json("/tokenize", body))["tokens"]
    except (EngineError, ServerAway, RequestFailed, RequestRefused, KeyError, TypeError):
        return None


def _check_rank(server: _Server, rank: int, base_url: str) -> None:
    if not server.model.is_vllm:
        raise ValueError(
            f"data_parallel_rank={rank} given, and {base_url} is not vLLM, which has ranks: leave "
            "it out"
        )
    if server.num_ranks and not 0 <= rank < server.num_ranks:
        raise ValueError(
            f"data_parallel_rank={rank} given, and {base_url} has {server.num_ranks} ranks: give "
            f"as many as it was started with, its --data-parallel-size"
        )


def _choose_tokenizer(server: _Server, given: Any | None, mode: Mode) -> Any | None:
    """None if there is none, and none is needed."""
    if given is not None:
        try:
            return checked_tokenizer(given, server.model.name, server.probe_token_ids)
        except TokenizerError as error:
            raise ValueError(f"tokenizer={given!r} given: {error}") from error
    if mode == "chat" or (mode == "auto" and not server.model.is_vllm):
        return None
    try:
        root = server.model.tokenizer_root
        return checked_tokenizer(root, server.model.name, server.probe_token_ids)
    except TokenizerError as error:
        if mode == "completions":
            raise ValueError(
                f"mode='completions' needs the model's tokenizer, but {error}"
            ) from error
        logger.warning(
            "vllm-relay: %s. Messages are sent, not tokens, and token counts are estimates: give "
            "the model's tokenizer",
            error,
        )
        return None
