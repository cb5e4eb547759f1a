# SPDX-License-Identifier: Apache-2.0
"""Answers that are cut or not of their type are told, and asked again; how long answers may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.fake_engine import FakeEngine, Fields, fields_of
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines.base import Completion, Completions, Prompt
from vllm_relay.tables.jobs.answers import MOST_TEXT_TOKENS, read_answer, with_max_tokens
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import DEFAULT_MAX_TOKENS, Question


@dataclass
class CuttingEngine(FakeEngine):
    """Writes a character as a token, and no more than the question and the prompt allow.

    Attributes:
        limits: of the answers that were asked for.
    """

    limits: list[int] = field(default_factory=list)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for prompt in prompts:
            self.prompts.append(prompt)
            most = prompt.max_tokens or question.most_tokens
            self.limits.append(most)
            text = self.answer(fields_of(prompt.message, question))
            yield Completion(
                prompt.number,
                text[:most],
                num_prompt_tokens=len(prompt.token_ids),
                num_output_tokens=min(len(text), most),
                is_cut=len(text) > most,
            )


def long_for_some(fields: Fields) -> str:
    return "word " * (int(fields["id"]) % 3 * 20 + 1)


def test_a_text_that_was_cut_says_so() -> None:
    rows = pa.table({"id": [str(number) for number in range(30)]})
    report = JobReport()
    question = Question("?", ("id",), max_tokens=50)
    found = ask(rows, question, CuttingEngine(long_for_some), report=report)
    for number, row in enumerate(found.to_pylist()):
        assert row["is_cut"] == bool(number % 3)
        assert row["answer"] == long_for_some({"id": str(number)})[:50].strip()
        assert row["error"] == ("the answer was cut after 50 tokens: give more max_tokens"
                                if row["is_cut"] else None)  # fmt: skip
    assert (report.num_cut, report.num_errors) == (20, 20)


@pytest.mark.parametrize(
    ("output", "bad", "good"),
    [
        (Output("text"), "word " * 20, "w"),
        (Output("int"), "Banana", "7"),
        (Output("bool"), "Banana", "true"),
        (Output("json"), "Banana", "{}"),
        (Output("text", ("yes", "no")), "Banana", "no"),
    ],
    ids=["cut", "int", "bool", "json", "choices"],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_only_answers_are_used_again(
    tmp_path: Path, output: Output, bad: str, good: str, has_file: bool
) -> None:
    question = replace(NUMBERS, output=output, max_tokens=40)
    path = tmp_path / "answers" if has_file else None

    def broken(fields: Fields) -> str:
        return bad if int(fields["id"]) % 2 else good

    connection = numbers_table(60)
    engine = CuttingEngine(broken)
    job = runner(connection, engine, path)
    job.answer(NUMBERS_SQL, question, "before")
    assert job.report.num_errors == 30
    engine.answer = lambda fields: good
    kept = job
    if has_file:
        job.close()
        kept = runner(connection, engine, path, retry_errors=False)
        assert kept.estimate(NUMBERS_SQL, question).num_known == 60
        kept.answer(NUMBERS_SQL, question, "kept")
        assert len(engine.prompts) == 60
        assert answered(connection, "kept") == answered(connection, "before")
        kept.close()
        job = runner(connection, engine, path)
    assert job.estimate(NUMBERS_SQL, question).num_known == 30
    job.answer(NUMBERS_SQL, question, "after")
    assert len(engine.prompts) == 90
    assert all(row[2] is not None and row[3] is None for row in answered(connection, "after"))
    assert job.estimate(NUMBERS_SQL, question).num_known == 60


@pytest.mark.parametrize(
    ("output", "text", "value"),
    [
        (Output("int"), "12", None),
        (Output("float"), "1.5", None),
        (Output("bool"), "true", True),
        (Output("json"), '{"a": 1}', '{"a": 1}'),
        (Output("json"), "12", None),
        (Output("text", ("no", "no idea")), "no", None),
        (Output("text", ("no", "no idea")), "no idea", "no idea"),
        (Output("text"), "no", "no"),
    ],
)
def test_what_is_left_of_a_value_is_no_value(output: Output, text: str, value: object) -> None:
    found = read_answer(output, text, 7, is_cut=True)
    assert found.value == value
    is_told = value is None or output == Output("text")
    assert found.is_cut == (found.error is not None) == is_told
    assert read_answer(output, text, 7, is_cut=False).error is None


@pytest.mark.parametrize("text", ["yes", '"Yes"', "Yes"])
def test_a_choice_that_was_cut_may_go_on_as_another(text: str) -> None:
    output = Output("text", ("Yes", "Yes, maybe", "no"))
    assert read_answer(output, text, 1, True).value is None
    assert read_answer(output, text, 1, False).value == "Yes"
    assert read_answer(output, "No", 1, True).value == "no"


def test_errors_of_long_answers_are_short() -> None:
    connection = numbers_table(1)
    engine = FakeEngine(lambda fields: "x" * 100_000)
    runner(connection, engine).answer(NUMBERS_SQL, replace(NUMBERS, output=Output("int")), "out")
    error = answered(connection)[0][3]
    assert len(error) <= 400 and error.endswith("is not of type int")


TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("output", "most"),
    [
        (Output("bool"), 7),
        (Output("int"), 21),
        (Output("float"), 34),
        (Output("text", ("a", "abcdefgh")), 10),
        (Output("text"), MOST_TEXT_TOKENS),
        (Output("json"), MOST_TEXT_TOKENS),
    ],
    ids=lambda each: each.type + "s" * bool(each.choices) if isinstance(each, Output) else "",
)
def test_answers_are_as_long_as_their_type_needs(output: Output, most: int) -> None:
    question = Question("?", ("id",), output)
    assert with_max_tokens(question, FakeEngine(tokenizer=TOKENIZER)).max_tokens == most
    assert with_max_tokens(question, FakeEngine()).max_tokens == max(most, DEFAULT_MAX_TOKENS)
    small = FakeEngine(tokenizer=TOKENIZER, max_model_len=800)
    assert with_max_tokens(question, small).max_tokens == min(most, 200)
    reasoning = FakeEngine(tokenizer=TOKENIZER, reasons=True)
    assert with_max_tokens(question, reasoning).max_tokens == MOST_TEXT_TOKENS
    given = replace(question, max_tokens=3)
    assert with_max_tokens(given, FakeEngine(tokenizer=TOKENIZER)).max_tokens == 3


def test_long_values_of_a_type_are_whole_by_default() -> None:
    rows = pa.table({"id": ["1"]})
    for output, text in [
        (Output("int"), str(-(10**18) + 1)),
        (Output("float"), str(-(10**18) + 1) + ".123456789012"),
        (Output("bool"), "false"),
        (Output("text", ("a", "ä" * 90)), "ä" * 90),
        (Output("text"), "word " * 200),
    ]:
        engine = CuttingEngine(lambda fields, text=text: text)
        found = ask(rows, Question("?", ("id",), output), engine)
        assert found["error"].to_pylist() == [None]


def test_an_answer_has_what_its_prompt_leaves_of_the_context() -> None:
    connection = numbers_table(20)
    connection.execute("UPDATE t SET kind = repeat('k', 22 * id::INT)")
    engine = CuttingEngine(lambda fields: "w" * 1000, tokenizer=TOKENIZER, max_model_len=500)
    job = runner(connection, engine)
    question = replace(NUMBERS, max_tokens=None)
    warning = job.estimate(NUMBERS_SQL, question).warning
    assert "of the model's 500 tokens" in warning
    job.answer(NUMBERS_SQL, question, "out")
    for prompt, limit in zip(engine.prompts, engine.limits, strict=True):
        assert limit == min(125, 500 - len(prompt.token_ids))
    assert min(engine.limits) < 125
    assert not job.estimate(NUMBERS_SQL, NUMBERS).warning  # whoever says how long knows
    roomy = runner(connection, replace(engine, max_model_len=5000))
    assert not roomy.estimate(NUMBERS_SQL, question).warning


def test_a_schema_of_many_properties_needs_more_room() -> None:
    connection = numbers_table(3)
    engine = FakeEngine(tokenizer=TOKENIZER, max_model_len=200)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20)}}
    question = Question("?", ("id", "kind"), Output.of("json", None, schema))
    assert "320 are needed" in runner(connection, engine).estimate(NUMBERS_SQL, question).warning


def test_tables_in_memory_are_asked_without_duckdb() -> None:
    rows = pa.table({"id": ["1", "2", "1", None, "3"], "kind": ['"a"', '"b"', '"a"', None, None]})
    engine = FakeEngine(lambda fields: "no" if fields["id"] == "2" else fields["id"])
    report = JobReport()
    found = ask(rows, replace(NUMBERS, output=Output("int")), engine, report=report)
    assert found["answer"].to_pylist() == [1, None, 1, None, 3]
    assert found["error"].to_pylist() == [None, "answer 'no' is not of type int", None, None, None]
    assert found["is_cut"].to_pylist() == [False] * 5
    assert len(engine.prompts) == 3
    assert (report.num_rows, report.num_prompts, report.num_null) == (5, 3, 1)


@pytest.mark.parametrize("answer", [json.dumps, str])
def test_halves_of_surrogate_pairs_are_replaced(answer: Callable[[str], str]) -> None:
    rows = pa.table({"id": ['"\\ud800"', '"b"']})
    engine = FakeEngine(lambda fields: answer("\ud800"))
    found = ask(rows, Question("?", ("id",)), engine)
    assert all("\ud800" not in each for each in found["answer"].to_pylist())
