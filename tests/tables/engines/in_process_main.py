# SPDX-License-Identifier: Apache-2.0
"""Runs jobs on vLLM, for test_in_process.py.

Usage: python -m tests.tables.engines.in_process_main MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
from vllm.inputs import tokens_input

from tests.support.small_llm import small_llm
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines import in_process
from vllm_relay.tables.engines.base import Completions, Prompt, PromptShape
from vllm_relay.tables.engines.in_process import InProcessEngine, sampling_params
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

_STRUCTURED = {
    "choices": Output("text", ("yes", "no", "maybe")),
    "alike": Output("text", ("no", "none", "north")),
    "accented": Output("text", ("a\N{LATIN SMALL LETTER E WITH ACUTE}", "b")),
    "int": Output("int"),
    "float": Output("float"),
    "bool": Output("bool"),
    "json": Output.of(
        schema={
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    ),
    "struct": Output.of("STRUCT(kind ENUM('a', 'b'), day DATE, parts STRUCT(ok BOOLEAN))"),
}


class Recorded:
    """An engine's prompts."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self.prompts: list[Prompt] = []
        self.interrupt_after: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        def recorded() -> Iterator[Prompt]:
            for prompt in prompts:
                self.prompts.append(prompt)
                yield prompt

        with closing(self._engine.generate(recorded(), question)) as completions:
            for number, completion in enumerate(completions):
                yield completion
                if number + 1 == self.interrupt_after:
                    raise KeyboardInterrupt


def run_jobs(engine: Recorded) -> dict[str, Any]:
    connection = numbers_table(40)
    job = runner(connection, engine)
    estimate = asdict(job.estimate(NUMBERS_SQL, NUMBERS))
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    rows = answered(connection)
    prompts = {prompt.number: tokens_input(prompt.token_ids) for prompt in engine.prompts}
    outputs = engine.llm.generate(
        [prompts[number] for number in range(40)], sampling_params(NUMBERS), use_tqdm=False
    )
    return {
        "answers": [row[2] for row in rows],
        "errors": [row[3] for row in rows],
        "is_cut": [output.outputs[0].finish_reason == "length" for output in outputs],
        "expected": [output.outputs[0].text for output in outputs],
        "report": asdict(job.report),
        "estimate": estimate,
    }


def run_structured(engine: Recorded) -> dict[str, Any]:
    connection = numbers_table(6)
    job = runner(connection, engine)
    found = {}
    for name, output in _STRUCTURED.items():
        question = Question("Which?", ("id", "kind"), output, max_tokens=64)
        job.answer(NUMBERS_SQL, question, name)
        rows = answered(connection, name)
        found[name] = [row[2] for row in rows], [row[3] for row in rows]
    return found


def run_choices(engine: Recorded) -> dict[str, Any]:
    """Answers that end when the choice is certain, and what vLLM answers as a whole."""
    found = {}
    for name in ("choices", "alike", "accented", "bool"):
        question = Question("Which?", ("id",), _STRUCTURED[name], temperature=1, seed=3)
        prompts = [Prompt(number, "", [5 + number] * 20) for number in range(12)]
        completions = sorted(engine.generate(prompts, question), key=lambda each: each.number)
        outputs = engine.llm.generate(
            [tokens_input(prompt.token_ids) for prompt in prompts],
            sampling_params(question),
            use_tqdm=False,
        )
        found[name] = {
            "values": [question.output.parse(each.text) for each in completions],
            "whole": [question.output.parse(output.outputs[0].text) for output in outputs],
            "num_tokens": [each.num_output_tokens for each in completions],
        }
    short = Question("Which?", ("id",), _STRUCTURED["alike"], max_tokens=2)
    [completion] = engine.generate([Prompt(0, "", [5] * 20)], short)
    found["too short"] = asdict(completion)
    config = engine.llm.llm_engine.vllm_config.structured_outputs_config
    for parser in ("qwen3", ""):
        config.reasoning_parser = parser
        limit = InProcessEngine(engine.llm).max_answer_tokens(question)
        found[f"limit with parser {parser!r}"] = limit
    return found


def run_scored(engine: Recorded) -> list[dict[str, Any]]:
    question = Question("Which?", ("id",), _STRUCTURED["bool"])
    prompts = [Prompt(number, "", [5 + number] * 20) for number in range(24)]
    return [asdict(each) for each in engine.generate_scored(prompts, question)]


def run_poisoned(engine: Recorded) -> Sequence[Any]:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT i AS id, repeat('x', CASE WHEN i % 20 = 0 THEN 600 ELSE 3 END) "
        "AS kind FROM range(200) AS numbers(i)"
    )
    runner(connection, engine).answer(
        NUMBERS_SQL, Question("Which?", ("id", "kind"), max_tokens=2), "out"
    )
    return [row[2:] for row in answered(connection)]


def run_interrupted(engine: Recorded) -> dict[str, Any]:
    long = Question("Which?", ("id",), max_tokens=200)
    prompts = (Prompt(number, "", [5 + number] * 20) for number in range(30))
    completions = engine.generate(prompts, long)
    next(completions)
    vllm = engine.llm.llm_engine
    before = vllm.get_num_unfinished_requests()
    completions.close()
    after = vllm.get_num_unfinished_requests()
    connection = numbers_table(40)
    # models of random weights do not end their texts
    job = runner(connection, engine, retry_errors=False)
    engine.interrupt_after = 3
    try:
        job.answer(NUMBERS_SQL, NUMBERS, "interrupted")
    except KeyboardInterrupt:
        engine.interrupt_after = None
    interrupted = vllm.get_num_unfinished_requests()
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    return {
        "unfinished_before_closing": before,
        "unfinished_after_closing": after,
        "unfinished_after_interruption": interrupted,
        "num_known_after_interruption": job.report.num_known,
        "num_rows_after_interruption": len(answered(connection)),
    }


def run_refused(engine: Recorded) -> list[dict[str, Any]]:
    prompts = iter([Prompt(0, "", [5] * 600), Prompt(1, "", [5] * 20)])
    return [asdict(each) for each in engine.generate(prompts, NUMBERS)]


def run_measured(engine: Recorded) -> dict[str, Any]:
    def cached() -> int:
        prompts = iter([Prompt(0, "", [7] * 100)])
        return next(engine.generate(prompts, NUMBERS)).num_cached_tokens

    in_process._LEAST_MEASURED_S = 0.2
    cached()
    before = cached()
    speed = engine.prompts_per_s(PromptShape(32, 16, 2), NUMBERS)
    return {
        "prompts_per_s": speed,
        "cached_before_measuring": before,
        "cached_after_measuring": cached(),
    }


def identities(engine: Recorded, model: Path) -> list[str]:
    llm = engine.llm
    found = [InProcessEngine(llm).identity, InProcessEngine(llm).identity]
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return [*found, InProcessEngine(llm).identity]


def main(model: str, folder: str) -> None:
    llm = small_llm(model, max_model_len=512, max_num_seqs=8)
    engine = Recorded(InProcessEngine(llm))
    found = run_jobs(engine)
    found["structured"] = run_structured(engine)
    found["decided"] = run_choices(engine)
    found["scored"] = run_scored(engine)
    found["poisoned"] = run_poisoned(engine)
    found["refused"] = run_refused(engine)
    found |= run_interrupted(engine)
    found |= run_measured(engine)
    found["identities"] = identities(engine, Path(model))
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
