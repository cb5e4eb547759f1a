# SPDX-License-Identifier: Apache-2.0
"""Random requests to the routes for pins and contexts: some of them make sense."""

from __future__ import annotations

import json
from random import Random
from typing import Any

IDS = ["a", "b", "c", "system-0", "A.b:c-d_e", "x" * 128]
_STRANGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, 2**70, "", " ", "\0", "é", "\ud800", "x" * 5000),
    *([], {}, [[]], {"": None}, [None], ["text", 1], {"role": []}, "@/etc/passwd", "../..", "NaN"),
]
_ROLES = ["system", "user", "assistant", "tool", "developer", "", 7]
_MARKUP = [
    "<hotel/>",
    "<hotel",
    "</hotel>",
    "<plan days='2'/>",
    "&amp;",
    "&x;",
    "text",
    "<!--",
    "]]>",
]


class RandomRequests:
    """Method, path below /relay, and body."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def next(self) -> tuple[str, str, bytes | None]:
        random = self._random
        kind = random.choice(["pins", "pins", "pins", "contexts"])
        action = random.random()
        if action < 0.1:
            return "GET", kind, None
        if action < 0.35:
            return "DELETE", f"{kind}/{self._path_id()}", None
        if action < 0.38:
            return random.choice(["PUT", "PATCH", "DELETE", "HEAD"]), kind, self._bytes()
        return "POST", kind, self._body(kind)

    def _path_id(self) -> str:
        strange = ["%00", "%2e%2e", "%ed%a0%80", "%C3%A9", "a%2Fb", "%20", "x" * 3000, "'", "%25"]
        return self._random.choice([*IDS, *strange])

    def _body(self, kind: str) -> bytes:
        random = self._random
        if random.random() < 0.05:
            return self._bytes()
        body: dict[str, Any] = {}
        form = random.choice(["prompt_token_ids", "text", "messages", "relay", "none", "strange"])
        if form == "prompt_token_ids":
            first, length = random.randrange(12) * 100, random.choice([0, 3, 4, 9, 16, 31, 39, 64])
            body[form] = list(range(first, first + length))
            if body[form] and random.random() < 0.2:
                body[form][random.randrange(length)] = self._strange()
        elif form == "text":
            body[form] = random.choice(["river ", "é", "\U0001f600", "a\0"]) * random.randrange(12)
        elif form == "messages":
            body[form] = [self._message() for _ in range(random.randrange(4))]
        elif form == "relay":
            prompt = "".join(random.choices(_MARKUP, k=random.randrange(6)))
            body[form] = {"schema": random.choice(["trip", "trap"]), "prompt": prompt}
            if random.random() < 0.3:
                name = random.choice(["mode", "repair_tokens", "schema", "prompt", "other"])
                body[form][name] = self._strange()
        elif form == "strange":
            body[random.choice(["prompt_token_ids", "text", "messages", "relay"])] = self._strange()
        if kind == "pins" and random.random() < 0.8:
            body["id"] = random.choice(IDS) if random.random() < 0.8 else self._strange()
        if random.random() < 0.3:
            body["ttl_s"] = random.choice([1e-3, 0.5, 60, 1e300, self._strange()])
        if random.random() < 0.05:
            body[random.choice(["ttl", "owner", "\ud800", "", "declaration"])] = self._strange()
        given = random.choice([body, body, body, body, body, body, body, [body], self._strange()])
        return json.dumps(given).encode()

    def _message(self) -> Any:
        random = self._random
        if random.random() < 0.1:
            return self._strange()
        content = self._strange() if random.random() < 0.2 else "be brief " * random.randrange(4)
        return {"role": random.choice(_ROLES), "content": content}

    def _strange(self) -> Any:
        return self._random.choice(_STRANGE)

    def _bytes(self) -> bytes:
        random = self._random
        broken = [
            b"",
            b"{",
            b"\xff\xfe",
            b"nul",
            b'{"text": "\\ud800"}',
            b"[" * 5000,
            b"NaN",
            b"1e999",
        ]
        return random.choice([*broken, random.randbytes(random.randrange(200))])
