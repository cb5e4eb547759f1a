# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.modules.chat_templates import TEMPLATES, character_tokenizer
from vllm_relay.modules.markup.schema import SchemaError
from vllm_relay.modules.prompt.text_tokens import MAX_TURNS, ChatTurns, render_of


class CountingRender:
    def __init__(self, template: str) -> None:
        self._render = render_of(character_tokenizer(template))
        self.num_turns: list[int] = []

    def __call__(self, messages: list[dict[str, str]], asks: bool) -> str:
        self.num_turns.append(len(messages))
        return self._render(messages, asks)


@pytest.mark.parametrize("template", TEMPLATES)
def test_many_turns_are_rendered_a_few_times(template: str) -> None:
    render = CountingRender(template)
    roles = ["user", "assistant"] * (MAX_TURNS // 2 - 1)
    found = ChatTurns(render).openings_and_closings(roles)
    assert len(render.num_turns) <= 6
    assert sum(render.num_turns) < 2 * MAX_TURNS
    few = ChatTurns(render).openings_and_closings(roles[:6])
    assert found[:6] == few
    assert found[6:] == few[2:4] * (len(roles) // 2 - 3)
    pairs = zip(roles, found, strict=True)
    texts = "".join(opening + role + closing for role, (opening, closing) in pairs)
    messages = [{"role": role, "content": role} for role in [*roles, "user"]]
    whole = render_of(character_tokenizer(template))(messages, False)
    assert whole.startswith(texts)


@pytest.mark.parametrize("roles", [["user"] * (MAX_TURNS + 1), ["user"] * 10_000])
def test_too_many_turns_are_refused(roles: list[str]) -> None:
    render = CountingRender("separate turns")
    with pytest.raises(SchemaError, match=f"found {len(roles)} turns, expected {MAX_TURNS} at"):
        ChatTurns(render).texts_between(roles)
    assert not render.num_turns


@pytest.mark.parametrize(
    "text",
    ["relay0stands0in", "relay1stands1in relay0stands0in", "relay0stands0in " * 2, "", "x" * 50],
)
def test_templates_that_change_texts_are_refused(text: str) -> None:
    turns = ChatTurns(lambda messages, asks: text)
    with pytest.raises(SchemaError, match="does not write a turn of user once and in its place"):
        turns.texts_between(["user", "user"])


def test_what_follows_turns_that_are_written() -> None:
    turns = ChatTurns(render_of(character_tokenizer("separate turns")))
    system = ("system", "<s><|system|>\n", "<|end|>\n")
    user = ("user", "<|user|>\n", "<|end|>\n")
    asked = "<|end|>\n<|assistant|>\n"
    assert turns.continuation([system, user], "x", [], is_open=True) == "x" + asked
    further = [("assistant", "y"), ("user", "z")]
    behind = "<|assistant|>\ny<|end|>\n<|user|>\nz" + asked
    assert turns.continuation([system, user], "x", further, is_open=True) == ("x<|end|>\n" + behind)
    assert turns.continuation([system, user], "", further, is_open=False) == behind
    with pytest.raises(SchemaError, match="in another way than those of its schema"):
        turns.continuation([user, user], "x", [], is_open=True)
    with pytest.raises(SchemaError, match="does not write '</end>' behind the last turn"):
        closed = ("system", "<s><|system|>\n", "</end>")
        turns.continuation([closed], "", [("user", "x")], is_open=False)
