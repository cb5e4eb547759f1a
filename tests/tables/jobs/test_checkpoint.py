# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept, and for what they are used again."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tables.fake_engine import FakeEngine, Fields, RefusedPrompt
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines.base import Completion
from vllm_relay.tables.jobs.checkpoint import Checkpoint, CheckpointError, Keys, KnownAnswer
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question


def num_asked(
    checkpoint: Path,
    question: Question = NUMBERS,
    *,
    num_rows: int = 50,
    identity: str = "fake",
    **options: Any,
) -> int:
    connection = numbers_table(num_rows)
    engine = FakeEngine(identity=identity)
    job = runner(connection, engine, checkpoint, **options)
    job.answer(NUMBERS_SQL, question, "out")
    job.close()
    assert [row[0] for row in answered(connection)] == list(range(num_rows))
    return len(engine.prompts)


def test_more_rows_and_other_orders_use_answers_again(tmp_path: Path) -> None:
    checkpoint = tmp_path / "answers"
    assert num_asked(checkpoint) == 50
    assert num_asked(checkpoint) == 0
    assert num_asked(checkpoint, num_rows=70) == 20
    for order in ("fixed", "per_row"):
        assert num_asked(checkpoint, order=order, bucket_rows=7) == 0


def test_the_kept_order_has_answers_of_its_own(tmp_path: Path) -> None:
    checkpoint = tmp_path / "answers"
    assert num_asked(checkpoint) == 50
    assert num_asked(checkpoint, order="keep") == 50
    assert num_asked(checkpoint, order="keep") == 0


@pytest.mark.parametrize(
    "question",
    [
        replace(NUMBERS, text="Which kind then?"),
        replace(NUMBERS, max_tokens=9),
        replace(NUMBERS, temperature=0.5),
        replace(NUMBERS, temperature=0.5, seed=1),
        replace(NUMBERS, output=Output("json")),
        replace(NUMBERS, output=Output("json", schema_json='{"type": "object"}')),
    ],
)
def test_other_questions_use_none(tmp_path: Path, question: Question) -> None:
    checkpoint = tmp_path / "answers"
    assert num_asked(checkpoint) == 50
    assert num_asked(checkpoint, question) == 50
    assert num_asked(checkpoint) == 0


def test_other_models_and_templates_use_none(tmp_path: Path) -> None:
    checkpoint = tmp_path / "answers"
    assert num_asked(checkpoint) == 50
    assert num_asked(checkpoint, identity="another") == 50
    assert num_asked(checkpoint, template=PromptTemplate(chat=False)) == 50
    assert num_asked(checkpoint) == 0


def test_answers_of_earlier_files_are_known() -> None:
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
    output = Output("struct", schema_json=schema)
    for each in (output, replace(output, check=lambda text: "")):
        keys = Keys("m", Question("Is {a} good?", ("a",), each), PromptTemplate(), False)
        assert keys.of(['"x"']).hex() == "ee8087b7677fcc7c7bd5e6b9c2cf29de"


def test_errors_are_not_kept(tmp_path: Path) -> None:
    def refuse(fields: Fields) -> str:
        raise RefusedPrompt("not now")

    connection = numbers_table(20)
    runner(connection, FakeEngine(refuse), tmp_path / "answers").answer(NUMBERS_SQL, NUMBERS, "out")
    assert num_asked(tmp_path / "answers", num_rows=20) == 20


def test_jobs_without_a_file_know_their_answers_until_they_are_closed() -> None:
    connection = numbers_table(20)
    engine = FakeEngine()
    job = runner(connection, engine)
    for target in ("first", "second"):
        job.answer(NUMBERS_SQL, NUMBERS, target)
    assert len(engine.prompts) == 20
    job.close()
    assert not engine.is_closed  # it is its owner's
    runner(connection, engine).answer(NUMBERS_SQL, NUMBERS, "third")
    assert len(engine.prompts) == 40


def test_a_known_answer_is_as_it_was(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "answers")
    keys = [index.to_bytes(16, "big") for index in range(1200)]
    for index, key in enumerate(keys[:1100]):
        checkpoint.keep(key, Completion(0, f"é\0{index}", "", index, 3, index + 1, index % 2 == 0))
    checkpoint.keep(keys[-1], Completion(0, error="away"))
    checkpoint.close()
    found = Checkpoint(tmp_path / "answers").known(keys)
    assert found == {
        key: KnownAnswer(f"é\0{index}", index, index + 1, index % 2 == 0)
        for index, key in enumerate(keys[:1100])
    }


def test_another_file_is_no_checkpoint_and_stays_as_it_is(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("something else\n" * 100)
    with pytest.raises(CheckpointError, match="not a database"):
        Checkpoint(text)
    assert text.read_text() == "something else\n" * 100
    database = tmp_path / "database"
    with sqlite3.connect(database) as other:
        other.execute("CREATE TABLE answers (a)")
    before = database.read_bytes()
    with pytest.raises(CheckpointError, match="another program's"):
        Checkpoint(database)
    assert database.read_bytes() == before


def test_a_damaged_file_is_named_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    assert num_asked(path, num_rows=2000) == 2000
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    content = bytearray(path.read_bytes())
    content[8192:-4096] = b"\xa5" * (len(content) - 12288)
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        num_asked(path, num_rows=2000)
    message = str(raised.value)
    assert str(path) in message and "malformed" in message and "\n" not in message


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    connection = numbers_table(3000)
    job = runner(connection, FakeEngine(), path)
    job.asker._checkpoint._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(CheckpointError, match=f"{path}.*full"):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    job.close()
    # what came before is there
    known = Checkpoint(path)._db.execute("SELECT count(*) FROM answers").fetchone()
    assert known is not None and known[0] > 100


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "answers").close()
    with sqlite3.connect(tmp_path / "answers") as newer:
        newer.execute("PRAGMA user_version = 2")
    with pytest.raises(CheckpointError, match="version 2, this program reads version 1"):
        Checkpoint(tmp_path / "answers")


def test_folders_that_are_missing_or_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder that can be written to"):
        Checkpoint(tmp_path / "missing" / "answers")
    with pytest.raises(CheckpointError, match="folder that can be written to"):
        Checkpoint(tmp_path)
    if os.geteuid() == 0:
        return  # who may write everywhere
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="folder that can be written to"):
        Checkpoint(tmp_path / "answers")


def test_an_answer_that_cannot_be_kept_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    connection = numbers_table(20)
    engine = FakeEngine()
    job = runner(connection, engine, tmp_path / "answers")
    with sqlite3.connect(tmp_path / "answers") as other:
        other.execute("DROP TABLE answers")
        other.execute("CREATE TABLE answers (key, text, prompt_tokens, output_tokens, is_cut, x)")
    other.close()
    with pytest.raises(CheckpointError, match="answers"):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert engine.num_aborted > 0


def test_many_may_open_a_new_file_and_write_to_it_at_once(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        checkpoint = Checkpoint(tmp_path / "answers")
        for index in range(100):
            key = (writer * 50 + index).to_bytes(16, "big")
            checkpoint.keep(key, Completion(0, str(writer * 50 + index)))
        checkpoint.close()

    for _ in range(5):
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(write, range(8)))
        keys = [index.to_bytes(16, "big") for index in range(450)]
        found = Checkpoint(tmp_path / "answers").known(keys)
        assert [found[key].text for key in keys] == [str(index) for index in range(450)]
        for file in tmp_path.iterdir():
            file.unlink()
