# SPDX-License-Identifier: Apache-2.0
"""Questions with the passages that are nearest to them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

FILE = "xquad.en.json"
_NUM_PASSAGES = 3
_NUM_FEATURES = 4096


def retrieved(questions: list[str], passages: list[str]) -> dict[str, list[Any]]:
    """A row per question, with its nearest passages by TF-IDF of hashed words."""
    words = [_words(text) for text in (*passages, *questions)]
    counts = np.zeros((len(words), _NUM_FEATURES), np.float32)
    for row, found in enumerate(words):
        for word, count in Counter(found).items():
            counts[row, _feature(word)] += count
    in_passages = (counts[: len(passages)] > 0).sum(axis=0)
    vectors = counts * np.log((1 + len(passages)) / (1 + in_passages)).astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    similarities = vectors[len(passages) :] @ vectors[: len(passages)].T
    nearest = np.argsort(-similarities, axis=1)[:, :_NUM_PASSAGES]
    return {
        "id": list(range(len(questions))),
        "question": questions,
        "passages": [[passages[number] for number in row] for row in nearest.tolist()],
    }


def read_questions(folder: Path, count: int) -> dict[str, list[Any]]:
    """The first questions of XQuAD, as they come, over all its passages."""
    found = sorted(folder.rglob(FILE))
    if not found:
        raise SystemExit(f"no {FILE} in the folder of --data or below: put it there")
    paragraphs = [
        paragraph
        for article in json.loads(found[0].read_text())["data"]
        for paragraph in article["paragraphs"]
    ]
    questions = [each["question"] for paragraph in paragraphs for each in paragraph["qas"]]
    return retrieved(questions[:count], [paragraph["context"] for paragraph in paragraphs])


def made_questions(count: int) -> dict[str, list[Any]]:
    """Questions of words of a passage each, and passages that have words in common."""
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("etaoinshrdlu"), 6)) for _ in range(2000)]
    weights = 1 / np.arange(1, len(vocabulary) + 1) ** 0.7
    weights /= weights.sum()
    num_passages = max(count // 5, _NUM_PASSAGES)
    passages = [" ".join(rng.choice(vocabulary, 110, p=weights)) for _ in range(num_passages)]
    questions = []
    for number in range(count):
        words = rng.choice(passages[number * num_passages // count].split(), 8)
        questions.append(f"what is {' '.join(words)}?")
    return retrieved(questions, passages)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _feature(word: str) -> int:
    return int.from_bytes(word.encode()[:12].ljust(12, b"\0"), "little") % 4093
