# SPDX-License-Identifier: Apache-2.0
"""Questions to the rows of a table, by llm_map, by SQL, and by vLLM's own means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.real_model.generation import found, tokens_prompts
from tests.real_model.workload import LETTERS_SQL, TABLE, TABLE_CHOICES, TABLE_QUESTION
from tests.tables.engines.in_process_main import Recorded
from vllm_relay.tables import connect, llm_map
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.question import Question


class RecordedByQuestion(Recorded):
    """An engine's prompts, by the text of the question."""

    def __init__(self, engine: InProcessEngine) -> None:
        super().__init__(engine)
        self.by_question: dict[str, list[Prompt]] = {}

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        first = len(self.prompts)
        yield from super().generate(prompts, question)
        self.by_question.setdefault(question.text, []).extend(self.prompts[first:])


def run_table(llm: LLM, model: str) -> Any:
    """With llm_map; the prompts that it made come with the answers, for other engines."""
    engine = Recorded(InProcessEngine(llm))
    table = pd.DataFrame(TABLE)
    mapped = llm_map(table, TABLE_QUESTION, engine=engine, choices=TABLE_CHOICES)
    asked = {prompt.number: list(prompt.token_ids) for prompt in engine.prompts}
    return {"answers": list(mapped.values), "prompts": [asked[row] for row in range(len(table))]}


def run_sql(llm: LLM, model: str) -> Any:
    """Rows, and by question the prompts of the letters that it was asked about."""
    engine = RecordedByQuestion(InProcessEngine(llm))
    letters = pd.DataFrame({"number": range(len(TABLE["letter"])), "letter": TABLE["letter"]})
    with connect(engine=engine, tables={"letters": letters}, on_error="raise") as connection:
        result = connection.sql(LETTERS_SQL)
        assert result is not None
        rows = result.fetchall()
    asked = {
        question: {
            number: list(prompt.token_ids)
            for prompt in prompts
            for number, letter in enumerate(TABLE["letter"])
            if letter in prompt.message
        }
        for question, prompts in engine.by_question.items()
    }
    return {"rows": rows, "asked": asked}


def run_rows(llm: LLM, asked: dict[str, Any]) -> Any:
    """Prompts of tables, by vLLM's own means.

    Args:
        asked: by name, `prompts`, `max_tokens`, and `choices` if there are any.
    """
    answers = {}
    for name, job in asked.items():
        choices = job.get("choices")
        constraint = StructuredOutputsParams(choice=choices) if choices else None
        params = SamplingParams(
            temperature=0,
            max_tokens=job["max_tokens"],
            logprobs=2,
            structured_outputs=constraint,
        )
        outputs = llm.generate(tokens_prompts(job["prompts"]), params, use_tqdm=False)
        answers[name] = [{**found(each), "text": each.outputs[0].text} for each in outputs]
    return answers
