# SPDX-License-Identifier: Apache-2.0
"""Clients that ask for what may not be, for too much, or for nothing to its end."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.modules.fuzzing import Fuzz, pml_of
from tests.prefix_cache.pins.random_requests import RandomRequests
from tests.serving.soak.client import Client
from tests.serving.soak.questions import ADAPTERS, CONFIGURED, POSTED, greedy

NUM_FLOODING = 12
GIVES_UP_S = 20.0
MAX_BODY_BYTES = 1 << 16
"""The server's max_markup_bytes."""


class HostileClients:
    """
    Args:
        client: with a key that owns nothing of what polite clients have.
        polite_pins: ids of the pins that are others'.
    """

    def __init__(self, client: Client, polite_pins: list[str], seed: int) -> None:
        self._client = client
        self._record = client.record
        self._polite_pins = polite_pins
        self._random = random.Random(seed)
        self._fuzz = Fuzz(seed)
        self._routes = RandomRequests(seed)
        self._schema = self._fuzz.schema()
        self._num_names = 0

    async def run_while(self, goes_on: Callable[[], bool]) -> None:
        """All of them."""
        kinds = [self._any_route, self._any_markup, self._any_body, self._oversized]
        kinds += [*[self._many_salts] * 4, *[self._many_pins] * 2, self._many_schemas]
        kinds += [self._thief, self._longest]
        kinds += [self._leaves_at_once, self._half_sent, self._never_reads]
        kinds += [self._flood] * NUM_FLOODING
        await asyncio.gather(*(self._repeat(kind, goes_on) for kind in kinds))

    async def _repeat(
        self, kind: Callable[[], Coroutine[Any, Any, None]], goes_on: Callable[[], bool]
    ) -> None:
        name = kind.__name__.strip("_")
        while goes_on():
            self._record.counts[f"hostile {name}"] += 1
            try:
                await kind()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._record.counts[f"hostile {name} {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)

    async def _any_route(self) -> None:
        method, path, body = self._routes.next()
        await self._client.send("any route", method, f"/relay/{path}", body, GIVES_UP_S)
        await asyncio.sleep(0.02)

    async def _any_markup(self) -> None:
        """A schema that may be right, under a name that everybody's prompts may use."""
        if self._random.random() < 0.1:
            self._schema = self._fuzz.schema()
        body = self._fuzz.markup(pml_of(self._schema)).encode(errors="replace")
        if self._random.random() < 0.2:
            await self._client.send("any markup", "DELETE", "/relay/schemas/s")
        await self._client.send("any markup", "POST", "/relay/schemas", body, GIVES_UP_S)
        await asyncio.sleep(0.02)

    async def _any_body(self) -> None:
        prompt = self._fuzz.prompt(self._schema)
        if self._random.random() < 0.5:
            prompt = self._fuzz.markup(prompt)
        body = self._fuzz.body(prompt).replace(b'"model": "m"', b'"model": "tiny"')
        path = self._random.choice(("/v1/completions", "/v1/chat/completions"))
        await self._client.send("any body", "POST", path, body, GIVES_UP_S)
        await asyncio.sleep(0.02)

    async def _oversized(self) -> None:
        long = "a" * (2 * MAX_BODY_BYTES)
        relay = {"schema": POSTED, "prompt": long}
        positions = '<schema name="long"><module name="m"><param name="p" len="60000"/></module>'
        asked: list[tuple[str, Any, set[int]]] = [
            ("/relay/schemas", long.encode(), {413, 429}),
            ("/relay/schemas", f"{positions}</schema>".encode(), {422, 429}),
            ("/relay/schemas", f'<schema name="s">{"a " * 30_000}</schema>'.encode(), {422, 429}),
            ("/relay/pins", {"relay": relay}, {413}),
            ("/relay/pins", {"prompt_token_ids": [7] * 300_000}, {400}),
            ("/v1/completions", {"model": "tiny", "relay": relay}, {413}),
            ("/v1/completions", {"model": "tiny", "prompt": [7] * 300_000}, {400}),
        ]
        path, body, expected = self._random.choice(asked)
        status, page = await self._client.send("oversized", "POST", path, body)
        if status not in expected:
            self._record.problem("oversized taken", f"{path} {status} {page}")
        await asyncio.sleep(0.3)

    async def _many_salts(self) -> None:
        """Each request with a salt and a tenant that nobody has had."""
        self._num_names += 1
        more = {"cache_salt": f"salt-{self._num_names}", "model": self._random.choice(ADAPTERS)}
        more["vllm_xargs"] = {"tenant": f"tenant-{self._num_names}"}
        body = {"prompt": [self._num_names % 500] * 40}
        await self._client.complete("many salts", body | greedy(1) | more, timeout_s=GIVES_UP_S)

    async def _many_pins(self) -> None:
        """Until there is no room for more, and then all go."""
        self._num_names += 1
        body = {"id": f"hostile-{self._num_names}", "ttl_s": self._random.choice((0.05, 2, 600))}
        prompt = [self._random.choice((5, 6, self._num_names % 500))] * 33
        body["prompt_token_ids"] = prompt
        status, _ = await self._client.send("many pins", "POST", "/relay/pins", body)
        if status == 507 or self._random.random() < 0.01:
            await self.unpin_all()
        await asyncio.sleep(0.02)

    async def unpin_all(self) -> None:
        """What this key has pinned."""
        _, page = await self._client.send("all pins", "GET", "/relay/pins")
        for pin in json.loads(page)["pins"]:
            if pin["owner"] == "api-key-1":
                await self._client.send("unpin all", "DELETE", f"/relay/pins/{pin['id']}")

    async def _many_schemas(self) -> None:
        """Until the server knows enough, and then they are forgotten."""
        self._num_names += 1
        body = (
            f'<schema name="many-{self._num_names}"><module name="m">a</module></schema>'.encode()
        )
        path = "/relay/schemas"
        status, _ = await self._client.send("many schemas", "POST", path, body)
        if status == 409:
            _, page = await self._client.send("all schemas", "GET", path)
            for name in json.loads(page)["schemas"]:
                if name.startswith("many-"):
                    await self._client.send("many schemas", "DELETE", f"{path}/{name}")
        await asyncio.sleep(0.1)

    async def _thief(self) -> None:
        """Unpins, renews and replaces what is another's."""
        pin_id = self._random.choice([*self._polite_pins, "system-0"])
        name = self._random.choice((POSTED, CONFIGURED))
        schema = f'<schema name="{name}">Mine.</schema>'.encode()
        asked: list[tuple[str, str, Any, set[int]]] = [
            ("DELETE", f"/relay/pins/{pin_id}", None, {403, 404}),
            ("DELETE", f"/relay/schemas/{name}", None, {403}),
            ("POST", "/relay/schemas", schema, {403, 429}),
        ]
        method, path, body, expected = self._random.choice(asked)
        status, page = await self._client.send("thief", method, path, body)
        if status not in expected:
            self._record.problem("stolen", f"{method} {path}: {status} {page}")
        unknown = self._client.with_key("wrong")
        status, page = await unknown.send("wrong key", method, path, body)
        if status != 401:
            self._record.problem("stolen", f"{method} {path}: {status} {page}")
        await asyncio.sleep(0.1)

    async def _longest(self) -> None:
        first = self._random.randrange(3, 400)
        prompt = [first + self._random.randrange(90) for _ in range(500)]
        await self._client.complete("longest", {"prompt": prompt} | greedy(12))

    async def _flood(self) -> None:
        """Many at a time of one prefix, which is always in the cache."""
        body = {"prompt": [*range(100, 228), self._random.randrange(3, 500)]}
        await self._client.complete("flood", body | greedy(10) | {"stream": True})

    async def _leaves_at_once(self) -> None:
        body = {"prompt": [self._random.randrange(3, 500)] * 120, "stream": True} | greedy(300)
        if self._random.random() < 0.5:
            await self._client.complete("leaves at once", body, stops_after=1)
        else:
            await self._client.complete("leaves at once", body, timeout_s=0.03)

    async def _half_sent(self) -> None:
        """Headers of a request, and half of its body or nothing."""
        path = self._random.choice(("/v1/completions", "/relay/pins", "/relay/schemas"))
        text = self._http(path, b'{"model": "tiny", "prompt": [7, 8', 100_000)
        _, writer = await self._connect()
        try:
            writer.write(text[: self._random.randrange(len(text))])
            await writer.drain()
            await asyncio.sleep(self._random.choice((0, 0.1, 3)))
        finally:
            writer.close()

    async def _never_reads(self) -> None:
        """A stream, by one that does not look at it."""
        body = {"model": "tiny", "prompt": [9] * 50, "stream": True, "logprobs": 5} | greedy(400)
        data = json.dumps(body).encode()
        _, writer = await self._connect(receive_bytes=2048)
        try:
            writer.write(self._http("/v1/completions", data, len(data)))
            await writer.drain()
            await asyncio.sleep(self._random.choice((1, 5)))
        finally:
            writer.transport.abort()

    async def _connect(
        self, receive_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._client.address)
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (parts.hostname, parts.port))
        return await asyncio.open_connection(sock=client, limit=1024)

    def _http(self, path: str, body: bytes, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: server", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in self._client.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body
