# SPDX-License-Identifier: Apache-2.0
"""What a stored context keeps of the plan of a kv head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm_relay.sparse.head_profile import query_from_json, query_to_json
from vllm_relay.sparse.query_types import QueryType


@dataclass(frozen=True)
class HeadPlan:
    """What a kv head's queries ask of its index, depending on how much of the context is reused.

    Attributes:
        by_prefix: prefix lengths in tokens, rising, and what is asked of each: a query with its
            width, or None to read all keys.
        why: `Plan.explain()` for the whole context.

    Raises:
        ValueError: no prefix length, or they do not rise.
    """

    by_prefix: tuple[tuple[int, QueryType | None], ...]
    why: str

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.by_prefix]
        if not lengths or lengths[0] < 1 or lengths != sorted(set(lengths)):
            raise ValueError(f"prefix lengths are {lengths}, expected rising ones from 1")

    def query_for(self, prefix_len: int) -> QueryType | None:
        """What is asked of the first `prefix_len` tokens: that of the planned prefix which is
        nearest in proportion. None to read them all."""
        tokens = math.log(max(prefix_len, 1))
        return min(self.by_prefix, key=lambda planned: abs(math.log(planned[0]) - tokens))[1]

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold."""
        by_prefix = [
            [length, None if query is None else query_to_json(query)]
            for length, query in self.by_prefix
        ]
        return {"by_prefix": by_prefix, "why": self.why}

    @classmethod
    def from_json(cls, content: Any) -> HeadPlan:
        """
        Raises:
            ValueError: not what `to_json` returned.
        """
        try:
            by_prefix = tuple(
                (length, None if query is None else query_from_json(query))
                for length, query in content["by_prefix"]
            )
            return cls(by_prefix, content["why"])
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(f"{error!r}, expected what HeadPlan.to_json() returns") from None
