# SPDX-License-Identifier: Apache-2.0
"""Requests to a server, what their failures mean and when one is made again; an event loop for
callers that have none."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from vllm_relay.tables.engines.addresses import ServerKey, is_loopback, is_safe, unsafe_key
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.messages import error_message

_CONNECT_TIMEOUT_S = 30.0
# vLLM closes connections that are idle for 5 s; one that closes as it is used loses a request
_KEEP_ALIVE_S = 4.0


class ServerAway(Exception):
    """The server cannot be reached, or turns requests away for now.

    Attributes:
        retry_after_s: how long it asks to wait.
        may_restart: whether it may be another process when it is back.
        is_full: whether it may have as many requests as it takes.
    """

    def __init__(
        self,
        reason: str,
        retry_after_s: float = 0.0,
        *,
        may_restart: bool = True,
        is_full: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.may_restart = may_restart
        self.is_full = is_full


class RequestFailed(Exception):
    """A request without a reply, or with one that a further request may not have.

    Attributes:
        may_restart: whether the server may be another process now.
    """

    def __init__(self, reason: str, *, may_restart: bool = False) -> None:
        super().__init__(reason)
        self.may_restart = may_restart


class RequestRefused(Exception):
    """A request that the server never takes.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ServerAddress:
    """
    Attributes:
        root_url: where /v1 and /metrics are.
        key: for it.
        data_parallel_rank: of the engine behind it that is meant; None leaves that to the server.
    """

    root_url: str
    key: ServerKey = ServerKey()
    data_parallel_rank: int | None = None

    @classmethod
    def of(
        cls,
        base_url: str,
        key: ServerKey,
        *,
        key_over_http: bool = False,
        data_parallel_rank: int | None = None,
    ) -> ServerAddress:
        """
        Args:
            base_url: with or without /v1 at its end.
            key_over_http: whether the key may be sent to another machine without encryption.
            data_parallel_rank: see above.

        Raises:
            ValueError: it is no address, or the key may not be sent there.
        """
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                f"base_url={base_url!r} given, expected an address such as http://localhost:8000/v1"
            )
        if parts.password is not None or parts.username is not None:
            raise ValueError(
                f"base_url given with a user's name in front of {parts.hostname!r}: give an API key"
            )
        if key.value is not None and not key_over_http and not is_safe(base_url):
            raise ValueError(unsafe_key(base_url, "api_key"))
        root_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(root_url, key, data_parallel_rank)

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.key.value is not None:
            found["Authorization"] = f"Bearer {self.key.value}"
        if self.data_parallel_rank is not None:
            found["X-data-parallel-rank"] = str(self.data_parallel_rank)
        return found

    @property
    def proxy(self) -> str | None:
        """The proxy that the environment names for it."""
        parts = urlsplit(self.root_url)
        host = parts.hostname or ""
        if is_loopback(host) or urllib.request.proxy_bypass(host):
            return None
        return urllib.request.getproxies().get(parts.scheme)

    @property
    def credentials(self) -> str:
        """Whether there is a key, for messages."""
        if self.key.value is not None:
            return "with this api_key"
        return f"without an api_key ({self.key.withheld})" if self.key.withheld else (
            "without an api_key")  # fmt: skip


class HttpClient:
    """Made by `open_http_client`; may have any number of requests at once."""

    def __init__(
        self, session: aiohttp.ClientSession, address: ServerAddress, timeout_s: float
    ) -> None:
        self._session = session
        self._address = address
        self._timeout_s = timeout_s

    async def get(self, path: str) -> bytes:
        """The page under a path.

        Raises:
            EngineError, ServerAway, RequestFailed, RequestRefused: there is none.
        """
        return await self._request("GET", path)

    async def get_json(self, path: str) -> Any:
        """As `get`, for JSON."""
        return _parsed(await self.get(path))

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """What is answered to JSON, which is JSON.

        Raises:
            EngineError, ServerAway, RequestFailed, RequestRefused: there is none.
        """
        return _parsed(await self._request("POST", path, body))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        url = self._address.root_url + path
        try:
            async with self._session.request(
                method, url, json=body, allow_redirects=False
            ) as reply:
                page = await reply.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerAway(f"no connection: {error}") from error
        except asyncio.TimeoutError as error:
            raise RequestFailed(f"no reply within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            reason = f"the connection broke: {error or type(error).__name__}"
            raise RequestFailed(reason, may_restart=True) from error
        _check_status(reply.status, reply.headers.get("Retry-After"), page, self._address)
        if 300 <= reply.status < 400:
            raise EngineError(
                f"{url} redirects to {reply.headers.get('Location')}: give that address"
            )
        return page


@asynccontextmanager
async def open_http_client(
    address: ServerAddress, timeout_s: float, headers: Mapping[str, str] | None = None
) -> AsyncIterator[HttpClient]:
    """A client whose connections end with the context.

    Args:
        timeout_s: of a request, from its start to the end of its reply.
        headers: of every request, beside the address's.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
        headers={**(headers or {}), **address.headers},
        proxy=address.proxy,
    ) as session:
        yield HttpClient(session, address, timeout_s)


def _check_status(
    status: int, retry_after: str | None, page: bytes, address: ServerAddress
) -> None:
    if status < 400:
        return
    reason = f"HTTP {status}: {error_message(page)}"
    if status in (401, 402, 403):
        raise EngineError(f"the server lets nobody in {address.credentials}: {reason}")
    if status in (429, 502, 503):
        raise ServerAway(
            reason,
            retry_after_s(retry_after),
            may_restart=status != 429,
            is_full=status != 502,
        )
    if status == 408 or status >= 500:
        raise RequestFailed(reason)
    rank = address.data_parallel_rank
    if rank is not None and f"data_parallel_rank {rank} is out of range" in reason:
        raise ValueError(
            f"data_parallel_rank={rank} given, and {address.root_url} has no such rank ({reason}): "
            f"give as many as it was started with, its --data-parallel-size"
        )
    raise RequestRefused(status, reason)


def _parsed(page: bytes) -> Any:
    try:
        return json.loads(page)
    except ValueError as error:
        raise RequestFailed(f"the reply is no JSON: {error_message(page)!r}") from error


@dataclass(frozen=True)
class RetryPolicy:
    """
    Attributes:
        max_retries: of a prompt whose requests fail, by themselves or in a server that is there.
        max_passed_over: how often a prompt may be turned away while others are answered.
        max_failed_in_a_row: prompts that fail one after the other, until the server counts as
            broken.
        max_refused_in_a_row: prompts that are refused one after the other, until a short one is
            asked instead: a server that refuses it too refuses all.
        first_delay_s: before the first retry; twice as long before each further one.
        max_delay_s: before any retry; a server may ask for more.
        patience_s: how long a server may be away, or turn all requests away, until it counts as
            gone.

    Raises:
        ValueError: a number is below 0.
    """

    max_retries: int = 4
    max_passed_over: int = 30
    max_failed_in_a_row: int = 32
    max_refused_in_a_row: int = 4
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} given, expected at least 0")

    def delay_s(self, num_failures: int, retry_after_s: float = 0.0) -> float:
        """How long to wait after so many failures: by chance, so that requests spread."""
        longest_s = min(self.first_delay_s * 2.0 ** min(num_failures - 1, 30), self.max_delay_s)
        return retry_after_s + longest_s * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, which is a number or a date; 0 without one."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())


Result = TypeVar("Result")


class LoopThread:
    """Made by `loop_in_thread`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run it beside others; they begin in the order in which they are started."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What it returns."""
        return self.start(coroutine).result()

    def cancel_all(self) -> None:
        """End what runs; returns when it has ended."""
        self.run(_cancel_others())


@contextmanager
def loop_in_thread() -> Iterator[LoopThread]:
    """A loop in a thread of its own; what still runs at the end is cancelled."""
    loop = asyncio.new_event_loop()
    # of a caller that never ends it, the interpreter still does
    thread = threading.Thread(target=loop.run_forever, name="relay-server-engine", daemon=True)
    thread.start()
    found = LoopThread(loop)
    try:
        yield found
    finally:
        found.cancel_all()
        found.run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
