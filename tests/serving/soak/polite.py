# SPDX-License-Identifier: Apache-2.0
"""Clients that ask what may be asked, and check each answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from tests.serving.soak.client import Client
from tests.serving.soak.questions import OUTPUT_TOKENS, POSTED, Question, Questions, greedy

SALTS = ("blue", "green")
TTL_S = 1.0
GONE_WITHIN_S = 60.0  # after that, on a busy machine


class PoliteClient:
    """
    Args:
        slack: first tokens that may come before another's though their requests ran later: how many
            requests run at once.
        max_overtakes: the server's option.
    """

    def __init__(
        self, client: Client, questions: Questions, number: int, slack: int, max_overtakes: int
    ) -> None:
        self._client = client
        self._record = client.record
        self._questions = questions
        self._number = number
        self._slack, self._max_overtakes = slack, max_overtakes
        self._random = random.Random(number)

    async def run_while(self, goes_on: Callable[[], bool]) -> None:
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *[self._plain] * 8,
            *[self._modular] * 4,
            *[self._abort] * 2,
            *[self._pin] * 2,
            self._schema,
        ]
        while goes_on():
            await self._finish(self._random.choice(kinds)())

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        self._record.counts["polite tasks"] += 1
        try:
            await work
        except (aiohttp.ClientError, TimeoutError) as error:
            self._record.problem("lost", f"{work.__qualname__}: {error!r}")

    async def _ask(self, question: Question, more: dict[str, Any]) -> Any:
        """The answer, which is right."""
        streams = self._random.random() < 0.7
        num_tokens = self._random.choice((1, 5, 20, OUTPUT_TOKENS))
        body = question.body | greedy(num_tokens) | more | {"stream": streams}
        kind = "polite modular" if "relay" in body else "polite"
        began_s = time.monotonic()
        answer = await self._client.complete(kind, body)
        self._record.took(f"{kind} answer", time.monotonic() - began_s)
        self._record.counts[f"{kind} answered"] += 1
        if answer.status != 200:
            self._record.problem("lost", f"{body}: {answer}")
        elif not question.is_answered_by(answer, num_tokens):
            self._record.problem("wrong", f"{body}: {answer}, expected {question.expected}")
        elif streams:
            self._check_turn(kind, answer.turn, body)
        return answer

    def _check_turn(self, kind: str, turn: Any, body: dict[str, Any]) -> None:
        kind = f"{kind} priority {turn.priority}"
        self._record.took(f"{kind} first token", turn.waited_s)
        self._record.saw(f"{kind} overtaken", turn.overtaken)
        self._record.saw(f"{kind} ran before", turn.ran_before)
        self._record.saw(f"{kind} open beside", turn.beside)
        if "relay" in body:  # its turn does not begin before its modules are there
            return
        self._record.counts["turns checked"] += 1
        bound = turn.beside + self._max_overtakes + self._slack
        ahead = bound + turn.beside + 1
        if turn.overtaken > bound or turn.ran_before > ahead:
            self._record.problem("starved", f"bounds {bound} and {ahead}: {turn}, {body}")

    async def _plain(self) -> None:
        more: dict[str, Any] = {"priority": self._random.choice((0, 0, 0, -1))}
        if self._random.random() < 0.3:
            more["cache_salt"] = self._random.choice(SALTS)
        if self._random.random() < 0.3:
            more["vllm_xargs"] = {"tenant": f"polite-{self._number}"}
        await self._ask(self._random.choice(self._questions.plain), more)

    async def _modular(self) -> None:
        question = self._random.choice(self._questions.modular)
        more = {"cache_salt": "blue"} if self._random.random() < 0.2 else {}
        await self._ask(question, more)

    async def _abort(self) -> None:
        """Closes its connection in the middle of the answer, or before that."""
        questions = self._random.choice((self._questions.plain, self._questions.modular))
        body = self._random.choice(questions).body | greedy(200)
        if self._random.random() < 0.5:
            stops_after = self._random.randrange(1, 6)
            await self._client.complete("aborted", body | {"stream": True}, stops_after=stops_after)
        else:
            asked = self._client.complete("aborted", body | {"stream": self._random.random() < 0.5})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked, self._random.choice((0.01, 0.1, 0.5)))
        self._record.counts["aborted"] += 1

    async def _pin(self) -> None:
        """Pins a prefix, finds it, and unpins it or waits until it is gone."""
        number = self._random.randrange(len(self._questions.prefixes))
        pin_id, has_ttl = f"polite-{self._number}", self._random.random() < 0.3
        body = {"id": pin_id, "prompt_token_ids": self._questions.prefixes[number]}
        if has_ttl:
            body["ttl_s"] = TTL_S
        status, page = await self._client.send("pin", "POST", "/relay/pins", body)
        if status == 507 or (status == 409 and has_ttl):  # its room went to others, or its time
            return
        if status != 201:
            self._record.problem("lost", f"pin {body}: {status} {page}")
            return
        pin = json.loads(page)
        if not has_ttl:
            plain = self._questions.plain
            fits = [each for each in plain if (each.prefix, each.body["model"]) == (number, "tiny")]
            answer = await self._ask(self._random.choice(fits), {})
            if answer.cached_tokens < pin["tokens"]:
                self._record.problem("pins not found", f"{pin}: {answer}")
        await self._unpin(pin, has_ttl)

    async def _unpin(self, pin: dict[str, Any], has_ttl: bool) -> None:
        mine = await self._find(pin["id"])
        if not has_ttl:
            if mine is None or mine["owner"] != "api-key-0" or not mine["resident"]:
                self._record.problem("stolen", f"{pin}: {mine}")
            path = f"/relay/pins/{pin['id']}"
            status, page = await self._client.send("unpin", "DELETE", path)
            if status != 204:
                self._record.problem("stolen", f"{pin}: {status} {page}")
            self._record.counts["pins used"] += 1
            return
        deadline_s = time.monotonic() + TTL_S + GONE_WITHIN_S
        while mine is not None:
            if time.monotonic() > deadline_s:
                self._record.problem("pins that stay", f"{mine}")
                return
            await asyncio.sleep(0.3)
            mine = await self._find(pin["id"])
        self._record.counts["pins expired"] += 1

    async def _find(self, pin_id: str) -> Any:
        _, page = await self._client.send("pins", "GET", "/relay/pins")
        return next((each for each in json.loads(page)["pins"] if each["id"] == pin_id), None)

    async def _schema(self) -> None:
        """Posts the same schema again, which changes nothing."""
        body = self._questions.schemas[POSTED].encode()
        status, page = await self._client.send("schema", "POST", "/relay/schemas", body)
        if status not in (201, 429):
            self._record.problem("stolen", f"schema: {status} {page}")
