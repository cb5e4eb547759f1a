# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts, from a function or from a server's /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.engines.addresses import ServerKey
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.client import MODELS_PATH
from vllm_relay.tables.engines.server.http import (
    HttpClient,
    RequestFailed,
    RequestRefused,
    RetryPolicy,
    ServerAddress,
    ServerAway,
    loop_in_thread,
    open_http_client,
)
from vllm_relay.tables.engines.server.models import choose_model, served_models

Vectors = npt.NDArray[np.float32]
Embed = Callable[[list[str]], Any]

_PATH = "/v1/embeddings"
_TEXTS_PER_REQUEST = 128
_MAX_RUNNING = 8


class ServerEmbeddings:
    """A function of texts: their vectors, from a server with OpenAI's API.

    Args:
        base_url: with or without /v1.
        model: its name; None takes the only one that the server has.
        api_key: None sends none.
        api_key_over_http: whether it may be sent to another machine without encryption.
        timeout_s: of a request.

    Raises:
        ValueError: the address is none, or the key would be sent in the open.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        api_key_over_http: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        key = ServerKey(api_key)
        self._address = ServerAddress.of(base_url, key, key_over_http=api_key_over_http)
        self._model = model
        self._timeout_s = timeout_s
        self._retries = RetryPolicy()

    def __call__(self, texts: list[str]) -> Vectors:
        """
        Returns:
            float32 [texts, dimensions].

        Raises:
            EngineError: the server does not answer, or not as expected.
        """
        with loop_in_thread() as loop:
            return loop.run(self._vectors(texts))

    async def _vectors(self, texts: list[str]) -> Vectors:
        places = asyncio.Semaphore(_MAX_RUNNING)
        async with open_http_client(self._address, self._timeout_s) as http:
            page = await self._answer(lambda: http.get_json(MODELS_PATH))
            try:
                model = choose_model(served_models(page), self._model).name
            except ValueError as error:
                raise EngineError(f"{self._address.root_url}: {error}") from error

            async def part(begin: int) -> list[list[float]]:
                async with places:
                    return await self._part(http, model, texts[begin : begin + _TEXTS_PER_REQUEST])

            parts = await asyncio.gather(*map(part, range(0, len(texts), _TEXTS_PER_REQUEST)))
        return np.array([vector for each in parts for vector in each], np.float32)

    async def _part(self, http: HttpClient, model: str, texts: list[str]) -> list[list[float]]:
        body = {"model": model, "input": texts}
        reply = await self._answer(lambda: http.post_json(_PATH, body))
        try:
            found = {int(each["index"]): each["embedding"] for each in reply["data"]}
            return [found[number] for number in range(len(texts))]
        except (KeyError, TypeError, ValueError):
            raise EngineError(
                f"{self._address.root_url}{_PATH} does not answer as expected: there is no vector "
                f"for each of {len(texts)} texts"
            ) from None

    async def _answer(self, request: Callable[[], Any]) -> Any:
        for num_failures in range(1, self._retries.max_retries + 2):
            try:
                return await request()
            except RequestRefused as error:
                raise EngineError(f"{self._address.root_url} refuses: {error}") from error
            except (ServerAway, RequestFailed) as error:
                if num_failures > self._retries.max_retries:
                    raise EngineError(
                        f"{self._address.root_url} failed {num_failures} times, last: {error}"
                    ) from error
            await asyncio.sleep(self._retries.delay_s(num_failures))
        raise AssertionError


def embedder(embeddings: Any) -> Embed:
    """
    Args:
        embeddings: a function from texts to their vectors, or a server's address.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(embeddings, str):
        return ServerEmbeddings(embeddings)
    if callable(embeddings):
        return embeddings
    raise TypeError(
        f"embeddings={embeddings!r} given, expected a function from a list of texts to an array of "
        f"vectors, or a server's address (http://...)"
    )


def unit_vectors(embed: Embed, texts: Sequence[str]) -> Vectors:
    """Vectors of length 1, or 0 where nothing is known, [texts, dimensions].

    Raises:
        ValueError: the function gives something else than a vector for each text.
    """
    distinct = list(dict.fromkeys(texts))
    given = embed(distinct) if distinct else np.zeros((0, 1))
    try:
        found = np.asarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"embeddings gave no array for {len(distinct)} texts ({error}), expected one vector of "
            f"numbers for each, all as long"
        ) from None
    if found.ndim != 2 or len(found) != len(distinct) or not np.isfinite(found).all():
        raise ValueError(
            f"embeddings gave an array of shape {list(found.shape)} for {len(distinct)} texts, "
            f"expected one vector of finite numbers for each"
        )
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    units = found / np.where(lengths > 0, lengths, 1)
    numbers = {text: number for number, text in enumerate(distinct)}
    return units[[numbers[text] for text in texts]]
