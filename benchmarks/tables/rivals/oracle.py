# SPDX-License-Identifier: Apache-2.0
"""A model that answers by rule, and what queries find with it."""

import zlib
from typing import Any

from benchmarks.tables.database import Database

Results = dict[str, Any]
"""Of each kind of query: ids of rows, or mean scores by title."""


class Oracle:
    """What the model says of a prompt."""

    def __init__(self, reviews: list[str]) -> None:
        self._reviews = list(dict.fromkeys(reviews))

    @staticmethod
    def sentiment(review: str) -> str:
        return "NEGATIVE" if zlib.crc32(review.encode()) % 2 else "POSITIVE"

    @staticmethod
    def score(review: str) -> int:
        return 1 + zlib.crc32(review.encode()) // 2 % 5

    def answer(self, prompt: str) -> str:
        if "Recommend other films" in prompt or "sentiment" not in prompt:
            return f"words {zlib.crc32(prompt.encode())}"
        review = next(each for each in self._reviews if each in prompt)
        if "from 1 to 5" in prompt:
            return str(self.score(review))
        if "True or False" in prompt:
            return str(self.sentiment(review) == "NEGATIVE")
        return self.sentiment(review)


def expected_results(database: Database) -> Results:
    films = database.films
    rows = list(zip(films["id"], films["title"], films["review"], strict=True))
    scores: dict[str, list[int]] = {}
    for _, title, review in rows:
        scores.setdefault(title, []).append(Oracle.score(review))
    negative = [number for number, _, review in rows if Oracle.sentiment(review) == "NEGATIVE"]
    return {
        "projection": films["id"],
        "filter": negative,
        "several": negative,
        "aggregation": {title: sum(found) / len(found) for title, found in scores.items()},
        "retrieval": database.questions["id"],
    }
