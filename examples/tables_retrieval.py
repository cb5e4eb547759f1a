# SPDX-License-Identifier: Apache-2.0
"""Answer questions by passages that a FAISS index finds, with shared passages first.

pip install faiss-cpu
python examples/tables_retrieval.py MODEL      a model's folder or hub id, or a server: http://...

Questions get the same passages in different places of their lists. With ``reorder`` each list is
sorted so that prompts begin alike; ``--keep`` shows what there is to save.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from vllm_relay.tables import llm_map, open_engine

TEXTS = Path(__file__).with_suffix(".json")
PROMPT = "Answer the question with a few words of the passages."


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


class TfIdf:
    """Vectors of texts, a dimension per word: how often it is there, less for common words."""

    def __init__(self, texts: Sequence[str]) -> None:
        texts_with = Counter(word for text in texts for word in set(words_of(text)))
        self._places = {word: place for place, word in enumerate(texts_with)}
        counts = np.array(list(texts_with.values()))
        self._weights = np.log((1 + len(texts)) / (1 + counts)) + 1

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors of length 1, float32 [texts, words]; 0 where no word is known."""
        vectors = np.zeros((len(texts), len(self._places)), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in words_of(text):
                if word in self._places:
                    vector[self._places[word]] += self._weights[self._places[word]]
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(lengths, 1e-12)


def retrieve(passages: Sequence[str], questions: Sequence[str], num_passages: int) -> pl.DataFrame:
    """A row for each question, with its nearest passages, the nearest first."""
    try:
        import faiss
    except ModuleNotFoundError:
        raise SystemExit("this example searches with FAISS: pip install faiss-cpu") from None
    embedding = TfIdf(passages)
    vectors = embedding.embed(passages)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    _, nearest = index.search(embedding.embed(questions), num_passages)
    found = [[passages[number] for number in numbers] for numbers in nearest.tolist()]
    return pl.DataFrame({"passages": found, "question": questions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model's folder or hub id, or a server: http://...")
    parser.add_argument("--passages", type=int, default=4, help="for each question")
    parser.add_argument("--keep", action="store_true", help="leave rows and passages as they are")
    options = parser.parse_args()

    texts = json.loads(TEXTS.read_text())
    if not 1 <= options.passages <= len(texts["passages"]):
        parser.error(f"--passages {options.passages} given, expected 1 to {len(texts['passages'])}")
    table = retrieve(texts["passages"], texts["questions"], options.passages)
    engine = open_engine(options.model)
    try:
        result = llm_map(
            table,
            PROMPT,
            ["passages", "question"],
            engine=engine,
            order="keep" if options.keep else "auto",
            reorder=() if options.keep else ("passages",),
            max_tokens=32,
        )
    finally:
        engine.close()
    for question, answer in zip(table["question"], result.values, strict=True):
        print(f"{question} {answer}")
    report = result.report
    print(f"Look at: {report.num_prompts} prompts of {report.prompt_tokens} tokens, "
          f"{report.cached_tokens} of them cached; the other way: "
          f"{'without' if options.keep else 'with'} --keep")  # fmt: skip


if __name__ == "__main__":
    main()
