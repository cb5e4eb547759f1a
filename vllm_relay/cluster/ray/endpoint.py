# SPDX-License-Identifier: Apache-2.0
"""What clients reach: each request goes to a replica, whose answer comes back as it is."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_relay.cluster.ray.asked import Asked, error, refusal
from vllm_relay.cluster.ray.page import ROUTES, ReplicaPages
from vllm_relay.cluster.ray.router import PrefixRouter
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest
from vllm_relay.cluster.requests import prompt_of

logger = logging.getLogger("vllm.relay")

HEALTH_TIMEOUT_S = 10.0
"""Whoever asks whether anybody is there does not wait for a replica that is being started."""
_HEALTH = "/health", "/ping"

MAX_TRIES = 3
"""Replicas that may die of a request before it is given up."""

# they wait in vLLM, which knows what it has room for and orders them by prefix
_NO_LIMIT = 100_000

# what all replicas answer alike
_FORWARDED = re.compile(
    "/v1/(?!(un)?load_lora_adapter|responses/).*|/v2/(embed|rerank)|/cohere/.*|/inference/v1/.*"
    "|/(health|ping|version|invocations|tokenize|detokenize|tokenizer_info)"
    "|/(classify|pooling|score|rerank|generative_scoring)"
    "|/relay/(static/.*)?"
)


def one_endpoint(
    replica_class: Any,
    *args: Any,
    num_replicas: int,
    num_endpoints: int = 1,
    **options: Any,
) -> serve.Application:
    """An application whose requests go to replicas by their prompts.

    Args:
        replica_class: has a method ``ask(request, asked)``, which gives what `answer_of` does.
        args: of `replica_class`.
        num_endpoints: processes that route, each with its own view of the replicas.
        options: of Ray Serve's deployment of the replicas.
    """
    router: Any = PrefixRouter
    replicas: Any = serve.deployment(
        name="replica",
        num_replicas=num_replicas,
        max_ongoing_requests=_NO_LIMIT,
        request_router_config=RequestRouterConfig(request_router_class=router),
        **options,
    )
    endpoint: Any = serve.deployment(
        name="endpoint",
        num_replicas=num_endpoints,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options={"num_cpus": 0},
    )
    return endpoint(Endpoint).bind(replicas(replica_class).bind(*args))


class Endpoint:
    """A deployment.

    Args:
        replicas: see `one_endpoint`.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas: Any = replicas.options(stream=True, method_name="ask")
        self._pages = ReplicaPages(self._replicas)

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if not (_FORWARDED.fullmatch(path) or ROUTES.fullmatch(path)):
            return refusal(f"{path} is not served here: it is no route, or one replica's own", 404)
        query, headers = request.scope["query_string"], request.headers.raw
        given = HttpRequest(request.method, path, query, headers, await request.body())
        if ROUTES.fullmatch(path):
            return await self._pages.answer(given)
        return Forwarded(self._replicas, given)


class Forwarded(Response):
    """The answer of a replica, sent as it comes."""

    def __init__(self, replicas: Any, request: HttpRequest) -> None:
        super().__init__()
        self._replicas = replicas
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked: Asked[Any] = Asked(prompt_of(self._request.body, self._request.path))
        answer: Any = None
        timeout_s = HEALTH_TIMEOUT_S if self._request.path in _HEALTH else None
        try:
            for tries_left in reversed(range(MAX_TRIES)):
                answer = self._replicas.remote(self._request, asked)
                try:
                    begin: HttpAnswer = await asyncio.wait_for(anext(answer), timeout_s)
                    break
                except TimeoutError:
                    nobody = f"no replica has answered for {timeout_s:g} s"
                    return await refusal(nobody, 503)(scope, receive, send)
                except RayActorError as error:
                    logger.warning(
                        "vllm-relay: a replica is gone, its request is %s: %s",
                        "asked elsewhere" if tries_left else "given up", error,
                    )  # fmt: skip
                except Exception:
                    logger.exception("vllm-relay: a request failed")
                    failure = "the request failed, the endpoint's log says why"
                    return await refusal(failure, 500)(scope, receive, send)
            else:
                gone = f"{MAX_TRIES} replicas ended before they answered: ask again later"
                return await refusal(gone, 503)(scope, receive, send)
            asked.answered()
            await send(
                {"type": "http.response.start", "status": begin.status, "headers": begin.headers}
            )
            await _send_body(send, begin.body, begin.has_more)
            if begin.has_more:
                async for body in _rest(answer, begin):
                    await _send_body(send, body, has_more=True)
                await _send_body(send, b"", has_more=False)
        finally:
            asked.ended()
            if answer is not None:
                answer.cancel()


async def _rest(answer: Any, begin: HttpAnswer) -> AsyncIterator[bytes]:
    """
    Raises:
        RayActorError: the replica is gone, and the answer is no stream of events, which end with
            an error.
    """
    try:
        async for body in answer:
            yield body
    except RayActorError:
        if not dict(begin.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        failure = error("the replica ended in the middle of the answer", 500)
        yield f"data: {json.dumps(failure)}\n\ndata: [DONE]\n\n".encode()


async def _send_body(send: Send, body: bytes, has_more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": has_more})
