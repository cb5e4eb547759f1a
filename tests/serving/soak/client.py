# SPDX-License-Identifier: Apache-2.0
"""A client of the server: one API key, answers in tokens."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.serving.soak.record import Record, Turn

TIMEOUT_S = 300.0  # with other work on the machine
DOCUMENTED_5XX = (501, 503, 507)


@dataclass
class Answer:
    """Of a completion; `page` is what there was to read if there was no answer."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    leads: list[float] = field(default_factory=list)
    page: str = ""
    turn: Turn | None = None


class Client:
    """
    Args:
        key: that of the server's API keys with which it asks.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: str, key: str, record: Record
    ) -> None:
        self._session = session
        self.address = address
        self.key = key
        self.record = record

    def with_key(self, key: str) -> Client:
        return Client(self._session, self.address, key, self.record)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

    async def send(
        self, kind: str, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, str]:
        """Status and page; the kind is what the status is counted under.

        Args:
            body: bytes, or what becomes JSON.
        """
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        began_s = time.monotonic()
        async with self._session.request(
            method,
            f"{self.address}{path}",
            data=data,
            headers=self.headers,
            timeout=aiohttp.ClientTimeout(timeout_s),
        ) as response:
            page = (await response.read()).decode(errors="replace")
        self.record.took(kind, time.monotonic() - began_s)
        self.note(kind, response.status, f"{method} {path} {data!r:.700} -> {page}")
        return response.status, page

    def note(self, kind: str, status: int, what: str) -> None:
        self.record.statuses[f"{kind} {status}"] += 1
        if status >= 500 and status not in DOCUMENTED_5XX:
            self.record.problem("undocumented 5xx", f"{status}: {what}")

    async def complete(
        self,
        kind: str,
        body: dict[str, Any],
        *,
        stops_after: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """A completion, streamed if the body says so.

        Args:
            stops_after: a stream is closed after so many events.

        Raises:
            aiohttp.ClientError, TimeoutError: there is no whole answer.
        """
        streams = body.get("stream", False)
        asked = {"model": "tiny", "return_token_ids": True, **body}
        if streams:
            asked["stream_options"] = {"include_usage": True}
        turn = self.record.turns.arrive(body.get("priority", 0))
        try:
            async with self._session.post(
                f"{self.address}/v1/completions",
                json=asked,
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(timeout_s),
            ) as response:
                answer = Answer(response.status, turn=turn)
                if streams and response.status == 200:
                    await self._read_stream(answer, response, turn, stops_after)
                else:
                    answer.page = (await response.read()).decode(errors="replace")
                    self.record.turns.start(turn)
        finally:
            self.record.turns.leave(turn)
        self.note(kind, answer.status, f"{asked!r:.700} -> {answer.page}")
        if not streams and answer.status == 200:
            _take(answer, json.loads(answer.page))
        return answer

    async def _read_stream(
        self, answer: Answer, response: aiohttp.ClientResponse, turn: Turn, stops_after: int | None
    ) -> None:
        num_events = 0
        async for line in response.content:
            event = line.decode().strip().removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            page = json.loads(event)
            if "choices" not in page:
                answer.status, answer.page = page["error"]["code"], event
                return
            _take(answer, page)
            if answer.token_ids:
                self.record.turns.start(turn)
            num_events += 1
            if num_events == stops_after:
                response.close()
                return


def _take(answer: Answer, page: dict[str, Any]) -> None:
    """Add what a page, or an event of a stream, has."""
    for choice in page["choices"]:
        answer.token_ids += choice["token_ids"] or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if logprobs := choice.get("logprobs"):
            for top in logprobs["top_logprobs"]:
                first, second = sorted(top.values(), reverse=True)[:2]
                answer.leads.append(first - second)
    details = (page.get("usage") or {}).get("prompt_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens") or answer.cached_tokens
