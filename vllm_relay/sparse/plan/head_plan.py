# SPDX-License-Identifier: Apache-2.0
"""What a stored context keeps of the plan of a kv head."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK


@dataclass(frozen=True)
class HeadPlan:
    """What a kv head's queries ask of its index, depending on how much of the context is reused.

    Attributes:
        by_prefix: prefix lengths in tokens, rising, and what is asked of each: a query with its
            width, or None to read all keys.
        why: the choice for the whole context, and what else there was (`explain`).
        max_error: that it was made for; None if it was made for a query that was given, which is
            then what is asked, or if its file does not say.

    Raises:
        ValueError: no prefix length, or they do not rise; an error outside of 0 to 1.
    """

    by_prefix: tuple[tuple[int, QueryType | None], ...]
    why: str
    max_error: float | None

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.by_prefix]
        are_counts = all(type(length) is int for length in lengths)
        if not are_counts or not lengths or lengths[0] < 1 or lengths != sorted(set(lengths)):
            raise ValueError(f"prefix lengths are {lengths}, expected rising ones from 1")
        error = self.max_error
        is_number = isinstance(error, (int, float)) and not isinstance(error, bool)
        if error is not None and not (is_number and 0 <= error <= 1):
            raise ValueError(f"max_error is {error!r}, expected a number from 0 to 1")

    def query_for(self, prefix_len: int) -> QueryType | None:
        """What is asked of the first `prefix_len` tokens: that of the planned prefix which is
        nearest in proportion. None to read them all."""
        tokens = math.log(max(prefix_len, 1))
        return min(self.by_prefix, key=lambda planned: abs(math.log(planned[0]) - tokens))[1]

    def keeps_to(self, max_error: float) -> bool:
        """Whether it was made for this `max_error`, or a smaller one."""
        return self.max_error is not None and self.max_error <= max_error

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold."""
        by_prefix = [
            [length, None if query is None else _query_to_json(query)]
            for length, query in self.by_prefix
        ]
        return {"by_prefix": by_prefix, "why": self.why, "max_error": self.max_error}

    @classmethod
    def from_json(cls, content: Any) -> HeadPlan:
        """Raises ValueError: not what `to_json` returned."""
        try:
            by_prefix = tuple(
                (length, None if query is None else (TopK if "k" in query else Dipr)(**query))
                for length, query in content["by_prefix"]
            )
            return cls(by_prefix, content["why"], content.get("max_error"))
        except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"{error!r}, expected what HeadPlan.to_json() returns") from None


def _query_to_json(query: QueryType) -> dict[str, Any]:
    return {key: value for key, value in asdict(query).items() if value is not None}
