# SPDX-License-Identifier: Apache-2.0
"""Jobs with prompt modules on vLLM, for test_modules_vllm.py.

Usage: python -m tests.tables.engines.modules_main FOLDER
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from vllm import LLM

from tests.support.small_llm import small_relay_llm
from tests.tables.jobs.job_cases import runner
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.tables.engines import in_process
from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.question import Question

NUM_USERS, NUM_PRODUCTS, NUM_PASSAGES = 6, 7, 6
ANSWER_WORDS = 3
TEXT_WORDS = 90


class Texts:
    """Texts with a fact in each: two words, and what follows them nowhere else."""

    def __init__(self, tokenizer: Any) -> None:
        self._rng = np.random.default_rng(0)
        words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
        order = self._rng.permutation(words).tolist()
        self._filler, self._words = order[:60], order[60:]

    def filler(self, num_words: int) -> str:
        return " ".join(self._rng.choice(self._filler, num_words))

    def with_fact(self) -> tuple[str, str, str]:
        """A text, the two words and the answer."""
        fact = [self._words.pop() for _ in range(2 + ANSWER_WORDS)]
        before = int(self._rng.integers(20, TEXT_WORDS - 20))
        text = f"{self.filler(before)} {' '.join(fact)} {self.filler(TEXT_WORDS - before)}"
        return text, " ".join(fact[:2]), " ".join(fact[2:])


def users_and_products(texts: Texts) -> tuple[pa.Table, list[str]]:
    """Every row asks for the fact of its user or its product."""
    users = [texts.with_fact() for _ in range(NUM_USERS)]
    products = [texts.with_fact() for _ in range(NUM_PRODUCTS)]
    columns: dict[str, list[str]] = {"user": [], "product": [], "review": []}
    answers = []
    for number, (user, product) in enumerate(itertools.product(users, products)):
        _, cue, answer = (user, product)[number % 2]
        columns["user"].append(user[0])
        columns["product"].append(product[0])
        columns["review"].append(f"{texts.filler(6)} {cue}")
        answers.append(answer)
    return pa.table(columns), answers


def claims(texts: Texts) -> tuple[pa.Table, list[str]]:
    """Every row asks for the fact of one of its passages."""
    passages = [texts.with_fact() for _ in range(NUM_PASSAGES)]
    columns: dict[str, list[Any]] = {"found": [], "claim": []}
    answers = []
    for number, found in enumerate(itertools.combinations(passages, 3)):
        _, cue, answer = found[number % 3]
        columns["found"].append([text for text, _, _ in found])
        columns["claim"].append(f"{texts.filler(6)} {cue}")
        answers.append(answer)
    return pa.table(columns), answers


def counts(llm: LLM) -> Counter[str]:
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        found[metric.name] += getattr(metric, "value", 0)
    return found


def asked(
    llm: LLM, table: pa.Table, question: Question, answers: list[str], modules: str
) -> dict[str, Any]:
    connection = duckdb.connect()
    connection.register("given", table)
    connection.execute("CREATE TABLE t AS SELECT * FROM given")
    llm.reset_prefix_cache()
    job = runner(connection, InProcessEngine(llm), modules=modules)
    before = counts(llm)
    estimate = job.estimate("FROM t", question)
    job.answer("FROM t", question, "out")
    rows = connection.execute("SELECT relay_answer, relay_error FROM out").fetchall()
    spent = counts(llm) - before
    return {
        "errors": [each for _, each in rows if each is not None and "was cut" not in each],
        "num_right": sum(
            answer.split() == right.split()
            for (answer, _), right in zip(rows, answers, strict=True)
        ),
        "num_rows": len(rows),
        "estimate": asdict(estimate),
        "report": asdict(job.report),
        "encodings": spent["relay:module_encodings"],
        "hits": spent["relay:module_hits"],
    }


def main(folder: str) -> None:
    model = build_recall_model(Path(folder, "model"), dtype="float32")
    llm = small_relay_llm(str(model), max_model_len=1024, max_num_seqs=8)
    in_process._LEAST_MEASURED_S = 0.0  # seconds of estimates are not what is tested
    texts = Texts(llm.get_tokenizer())
    cases = {
        "fields": (
            Question("What of {user}?", ("user", "product", "review"), max_tokens=ANSWER_WORDS),
            *users_and_products(texts),
        ),
        "sets": (
            Question("?", ("found", "claim"), max_tokens=ANSWER_WORDS, set_fields=("found",)),
            *claims(texts),
        ),
    }
    found = {
        name: {
            modules: asked(llm, table, question, answers, modules)
            for modules in ("off", "modular", "repair")
        }
        for name, (question, table, answers) in cases.items()
    }
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
