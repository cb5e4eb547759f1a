# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay modules check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.modules.chat_templates import TEMPLATES, character_tokenizer
from tests.support.refusals import ended
from vllm_relay.modules.check_command import run_check

SCHEMA = """<schema name="trip">
  <user>
    Go.
    <module name="plan">For <param name="days" len="5"/>.
      <module name="sea" cache="false">By the sea.</module>
    </module>
  </user>
</schema>"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    character_tokenizer("separate turns").save_pretrained(folder)
    return folder


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "trip.xml"
    path.write_text(SCHEMA)
    return path


def check(path: Path, model: Path | None = None, **keywords: Any) -> int:
    options: dict[str, Any] = {"chat_template": None, "block_size": 32, "prompts": (),
                               "as_json": False}  # fmt: skip
    name = None if model is None else str(model)
    return run_check(path, model=name, **{**options, **keywords})


def test_without_a_model_it_is_read(schema: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(schema) == 0
    assert "schema trip: understood; modules: plan, sea" in capsys.readouterr().out
    assert check(schema, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "trip", "modules": ["plan", "sea"]}


def test_a_model_without_a_chat_template(
    schema: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    character_tokenizer(None).save_pretrained(model)
    assert check(schema, model) == 1
    printed = capsys.readouterr().err
    assert "the model has no chat template" in printed
    assert "give one with --chat-template" in printed
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["separate turns"])
    assert check(schema, model, chat_template=template) == 0


def test_with_a_model_its_layout_is_shown(
    schema: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.xml"
    prompt.write_text('<prompt schema="trip"><plan days="3 d"/>?</prompt>')
    assert check(schema, model, prompts=(prompt,), as_json=True) == 0
    layout = json.loads(capsys.readouterr().out)
    assert [each["module"] for each in layout["modules"]] == ["", "plan", "plan/sea"]
    plan, sea = layout["modules"][1:]
    assert (plan["tokens"], plan["blocks"], plan["padding_tokens"]) == (11, 1, 21)
    assert (sea["tokens"], sea["cached"], sea["blocks"]) == (11, False, 0)
    first = len("|<|user|>\nGo.\n")
    assert layout["prompts"] == {
        str(prompt): {
            "cached_tokens_by_module": {"": first, "plan": 6},
            "new_tokens": len("3 d?<|end|>\n<|assistant|>\n"),
            "tokens_with_padding": 64 + len("3 d?<|end|>\n<|assistant|>\n"),
            "end_position": first + 11 + len("?<|end|>\n<|assistant|>\n"),
        }
    }


def test_the_layout_is_a_table(
    schema: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.xml"
    prompt.write_text('<prompt schema="trip"><plan/>?</prompt>')
    assert check(schema, model, prompts=(prompt,)) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "schema trip: 36 positions, KV blocks of 32 tokens" in lines
    assert "(every prompt) 0 36 14 1 18" in lines
    assert "plan 14 22 11 1 21 days (5)" in lines
    assert "sea 25 11 11 0 0 not cached" in lines
    assert "20 tokens cached" in " ".join(lines)


def test_a_chat_template_may_be_given(
    schema: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["default system prompt"])
    assert check(schema, model, chat_template=template, as_json=True) == 0
    beginning = "[system] Be kind. [/system][user] Go.\n"
    assert json.loads(capsys.readouterr().out)["modules"][0]["tokens"] == len(beginning)


@pytest.mark.parametrize("bad", ["schema", "prompt", "template"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"<schema \xff/>", "expected text in UTF-8"), (None, "cannot read it")],
)
def test_files_that_cannot_be_read_are_refused(
    schema: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    bad: str,
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    status, refusal = ended(
        lambda: check(
            path if bad == "schema" else schema,
            model,
            prompts=(path,) if bad == "prompt" else (),
            chat_template=path if bad == "template" else None,
        )
    )
    captured = capsys.readouterr()
    assert (status, captured.out) == (2 if content is None else 1, "")
    told = refusal or captured.err
    assert message in told and str(path) in told


def test_what_is_refused_is_told_with_its_place(
    schema: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.xml"
    prompt.write_text('<prompt schema="trip">\n  <plane/>?</prompt>')
    assert check(schema, model, prompts=(prompt,)) == 1
    assert f"{prompt}:2:3: the prompt: unknown module <plane>" in capsys.readouterr().err
    schema.write_text("<schema>")
    assert check(schema) == 1
    assert f"{schema}:1:9: no element found" in capsys.readouterr().err
