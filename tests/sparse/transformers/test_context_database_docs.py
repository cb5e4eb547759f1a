# SPDX-License-Identifier: Apache-2.0
"""The example of docs/context-database.md runs and answers right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_relay.demo.workload import ledger_workload
from vllm_relay.sparse import DBOptions

PAGE = Path(__file__).parents[3] / "docs" / "context-database.md"


def test_the_example_answers_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    (talk,) = ledger_workload(
        num_system_prompts=1, system_prompt_tokens=4000, questions_per_prompt=2, output_tokens=4
    )
    assert len(lines) == 2
    for line, question in zip(lines, talk.questions, strict=True):
        assert question.continuation is not None
        assert question.continuation.lower() in line
        assert not re.search(r"reused=0\b|searches=0\b", line)


def test_every_option_is_described() -> None:
    text = PAGE.read_text()
    missing = [name for name in DBOptions.model_fields if f"`{name}`" not in text]
    assert missing == []
