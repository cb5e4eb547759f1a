# SPDX-License-Identifier: Apache-2.0
"""Prompts held against their schemas: tokens, positions, and what each token sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.modules.chat_templates import (
    MARKUPS,
    TEMPLATES,
    character_tokenizer,
    text_of,
)
from tests.modules.random_prompts import SchemaMaker, random_prompt
from tests.modules.reference import Meaning, Token
from tests.support.depth import cases
from vllm_relay.modules.markup.pml import parse_prompt, parse_schema
from vllm_relay.modules.markup.schema import SchemaError
from vllm_relay.modules.markup.xml_tree import PmlError
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.modules.prompt.render import Mode, RenderedPrompt
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.modules.prompt.text_tokens import MAX_TURNS

TRIP = """<schema name="trip">
  <system>You plan trips.</system>
  <user>
    Go.
    <module name="plan">For <param name="days" len="5"/>.
      <union><module name="sea">By the sea.</module><module name="city">In a city.</module></union>
    </module>
    <module name="hotel">A hotel.</module>
  </user>
</schema>"""


def store_of(schema: str, template: str | None = None, **keywords: int) -> SchemaStore:
    store = SchemaStore(character_tokenizer(template), block_size=32, **keywords)
    store.add(parse_schema(schema))
    return store


def visible(plan: ModulePlan) -> list[tuple[int, ...]]:
    """How many tokens of each segment the runs of the tail see."""
    return [tuple(visible) for _, _, visible in plan.computed_runs()]


def texts_of(rendered: RenderedPrompt) -> tuple[dict[str, str], str]:
    """What lies in each segment, and in the tail."""
    plan = rendered.plan
    assert plan is not None and len(rendered.token_ids) == plan.num_prompt_slots
    segments = {
        segment.name: text_of(plan.segment_tokens(index, rendered.token_ids))
        for index, segment in enumerate(plan.segments)
    }
    return segments, text_of(rendered.token_ids[plan.num_stored_slots :])


def test_separate_turns() -> None:
    store = store_of(TRIP, "separate turns")
    prompt = '<prompt schema="trip"><plan days="3 d"><sea/></plan><hotel/> Where?</prompt>'
    rendered = store.render(prompt)
    segments, tail = texts_of(rendered)
    assert segments == {
        "": "<s><|system|>\nYou plan trips.<|end|>\n<|user|>\nGo.\n",
        "plan": "For ?????.\n",
        "plan/sea": "By the sea.",
        "hotel": "A hotel.",
    }
    assert tail == "3 d Where?<|end|>\n<|assistant|>\n"
    assert rendered.module_tokens == {"": 48, "plan": 6, "plan/sea": 11, "hotel": 8}
    plan = rendered.plan
    assert plan is not None
    argument, behind = plan.tail
    assert (argument.num_tokens, argument.position) == (3, 52)
    assert visible(plan) == [(48, 4, 0, 0), (48, 11, 11, 8)]
    assert behind.position == 48 + 11 + 11 + 8
    assert rendered.end_position == behind.position + behind.num_tokens
    whole = store.render(prompt, mode="exact")
    assert whole.plan is None
    assert text_of(whole.token_ids) == (
        "<s><|system|>\nYou plan trips.<|end|>\n<|user|>\nGo.\nFor 3 d.\nBy the sea.A hotel. Where?"
        "<|end|>\n<|assistant|>\n"
    )


SYSTEM = ("system", "You plan trips.")
READY = TRIP.replace("</schema>", "<assistant>Ask.</assistant></schema>")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("schema", "body", "turns"),
    [
        (TRIP, "<hotel/> Where?", [SYSTEM, ("user", "Go.\nA hotel. Where?")]),
        (TRIP, "<hotel/>", [SYSTEM, ("user", "Go.\nA hotel.")]),
        (
            TRIP.replace("<system>You plan trips.</system>", ""),
            "<hotel/>?",
            [("user", "Go.\nA hotel.?")],
        ),
        (
            TRIP,
            "<hotel/> Where?<assistant>There.</assistant><user>And?</user>",
            [SYSTEM, ("user", "Go.\nA hotel. Where?"), ("assistant", "There."), ("user", "And?")],
        ),
        (
            READY,
            "<hotel/><user>Where?</user>",
            [SYSTEM, ("user", "Go.\nA hotel."), ("assistant", "Ask."), ("user", "Where?")],
        ),
        (
            READY,
            "<hotel/> Where? <assistant>There.</assistant><user>And?</user>",
            [
                SYSTEM,
                ("user", "Go.\nA hotel."),
                ("assistant", "Ask."),
                ("user", "Where?"),
                ("assistant", "There."),
                ("user", "And?"),
            ],
        ),
    ],
)
def test_turns_are_those_of_the_template(
    template: str, schema: str, body: str, turns: list[tuple[str, str]]
) -> None:
    """The text with all its modules is what the template makes of whole turns."""
    store = store_of(schema, template)
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = character_tokenizer(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text_of(store.render(body, schema="trip", mode="exact").token_ids) == expected
    segments, tail = texts_of(store.render(body, schema="trip"))
    assert segments["hotel"] == "A hotel."
    assert segments[""] + tail == expected.replace("A hotel.", "")


def test_a_schema_without_turns_begins_as_prompts_do() -> None:
    store = store_of('<schema name="s">In. <module name="a">A</module></schema>')
    segments, tail = texts_of(store.render('<prompt schema="s"><a/>?</prompt>'))
    assert (segments, tail) == ({"": "<s>In. ", "a": "A"}, "?")
    exact = store.render('<prompt schema="s"><a/>?</prompt>', mode="exact")
    assert text_of(exact.token_ids) == "<s>In. A?"


def test_members_of_a_union_begin_alike() -> None:
    store = store_of(
        '<schema name="s">x<union><module name="a">12345</module><module name="b">12</module>'
        '</union><module name="c">c</module></schema>'
    )
    for name, end in (("a", 8), ("b", 8)):
        plan = store.render(f'<prompt schema="s"><{name}/><c/>?</prompt>').plan
        assert plan is not None
        _, union, behind = plan.segments
        assert union.position_runs == ((0, 2),) and behind.position_runs == ((0, 7),)
        assert plan.tail[0].position == end
    between = store.render('<prompt schema="s"><b/>zz<c/>?</prompt>').plan
    assert between is not None
    assert [run.position for run in between.tail] == [4, 8]
    assert visible(between) == [(2, 2, 0), (2, 2, 1)]


def test_modules_of_a_scaffold_see_each_other_where_all_are_imported() -> None:
    store = store_of(
        '<schema name="s"><scaffold modules="c a"/><module name="a">a</module>'
        '<module name="b">b</module><module name="c">c</module></schema>'
    )
    plan = store.render('<prompt schema="s"><a/><b/><c/>?</prompt>').plan
    assert plan is not None
    assert [segment.context for segment in plan.segments] == [
        (),
        ((0, 1),),
        ((0, 1),),
        ((0, 1), (1, 1)),
    ]
    plan = store.render('<prompt schema="s"><b/><c/>?</prompt>').plan
    assert plan is not None
    assert [segment.context for segment in plan.segments] == [(), ((0, 1),), ((0, 1),)]


def test_scaffolds_hold_where_nothing_stands_around_them() -> None:
    store = store_of(
        '<schema name="s"><module name="m"><scaffold modules="a b"/><scaffold modules="b a"/>'
        '<module name="a">a</module><module name="b">b</module></module></schema>'
    )
    plan = store.render('<prompt schema="s"><m><a/><b/></m>?</prompt>').plan
    assert plan is not None
    assert [(s.name, s.context) for s in plan.segments] == [
        ("", ()),
        ("m/a", ((0, 1),)),
        ("m/b", ((0, 1), (1, 1))),
    ]


def test_many_modules_that_see_each_other_take_no_long_time() -> None:
    names = [f"m{number}" for number in range(40)]
    modules = "".join(f'<module name="{name}">{name}</module>' for name in names)
    store = store_of(f'<schema name="s"><scaffold modules="{" ".join(names)}"/>{modules}</schema>')
    imports = "".join(f"<{name}/>" for name in names)
    plan = store.render(f'<prompt schema="s">{imports}?</prompt>').plan
    assert plan is not None
    assert len(plan.encoding_plan(40).segments) == 41


def test_positions_that_a_model_has_not_are_refused() -> None:
    """Of placeholders too, and of what stands behind what is not imported."""
    store = store_of(
        f'<schema name="s">a<union><module name="b">{"b" * 60}</module></union>'
        '<param name="p" len="30"/></schema>',
        max_model_len=92,
    )
    with pytest.raises(PmlError, match="positions up to 91, the model takes less than 92"):
        store.render('<prompt schema="s">?</prompt>')


def test_repair_takes_the_place_of_the_first_tokens() -> None:
    store = store_of('<schema name="s">In. <module name="a">12345</module></schema>')
    rendered = store.render('<prompt schema="s"><a/>?</prompt>', mode="repair", repair_tokens=3)
    assert texts_of(rendered) == ({"": "<s>In. ", "a": "12345"}, "123?")
    plan = rendered.plan
    assert plan is not None
    assert plan.segments[1].replaced == ((0, 3),)
    assert [(run.num_tokens, run.position) for run in plan.tail] == [(3, 5), (1, 10)]
    assert visible(plan) == [(5, 0), (5, 5)]
    assert rendered.module_tokens == {"": 5, "a": 2}
    assert plan.hidden_slots((5, 5)) == ((5, 35), (37, 64))


def test_tokens_that_are_not_seen_are_tokens_of_the_prompt() -> None:
    """Or penalties of repetition would find what the prompt does not say."""
    store = store_of(
        '<schema name="s"><module name="a">1<param name="p" len="4" scaffold="XYZ"/></module>'
        "</schema>"
    )
    rendered = store.render('<a p="2"/>3', schema="s")
    assert set(text_of(rendered.token_ids)) == set("<s>123")
    assert texts_of(rendered)[0]["a"] == "1XYZ?"
    plan = rendered.plan
    assert plan is not None
    encoded = plan.encoding_tokens(1, rendered.token_ids)
    assert text_of(encoded[32:38]) == "1XYZ??"


def test_repair_goes_on_behind_arguments_and_modules() -> None:
    store = store_of(
        '<schema name="s">In. <module name="a">12<param name="p" len="4"/>3'
        '<module name="b">bbb</module>456</module></schema>'
    )
    rendered = store.render('<a p="x"><b/></a>?', schema="s", mode="repair", repair_tokens=4)
    assert texts_of(rendered) == ({"": "<s>In. ", "a": "12????3456", "a/b": "bbb"}, "12x3bbb4?")
    plan = rendered.plan
    assert plan is not None
    assert [segment.replaced for segment in plan.segments] == [
        (),
        ((0, 2), (6, 7), (7, 8)),
        ((0, 3),),
    ]
    assert rendered.module_tokens == {"": 5, "a": 2, "a/b": 0}


def test_scaffolds_hold_only_where_all_names_stand_beside_each_other() -> None:
    store = store_of(
        '<schema name="s"><scaffold modules="a b"/><module name="a">a</module>'
        '<module name="b">b</module><module name="c">c<module name="a" cache="false">d</module>'
        "</module></schema>"
    )
    plan = store.render("<a/><b/><c><a/></c>?", schema="s").plan
    assert plan is not None
    assert [(segment.name, segment.context) for segment in plan.segments] == [
        ("", ()),
        ("a", ((0, 1),)),
        ("b", ((0, 1), (1, 1))),
        ("c", ((0, 1),)),
    ]


def test_how_many_tokens_may_follow() -> None:
    store = store_of('<schema name="s"><module name="a">12345</module></schema>')
    rendered = store.render("<a/>?", schema="s")
    assert rendered.min_model_len == 65  # "<s>" and "12345" in 32 slots each, and "?"
    assert rendered.limit_output(None, 100) == 35
    assert rendered.limit_output(50, 100) == 35
    assert rendered.limit_output(20, 100) == 20
    assert (rendered.limit_output(None, None), rendered.limit_output(20, None)) == (None, 20)


class SpacelessTokenizer:
    """As tokenizers of words: white space is no token."""

    unk_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_question_without_tokens_is_none() -> None:
    store = SchemaStore(SpacelessTokenizer(), block_size=32)
    store.add(parse_schema('<schema name="s"><module name="a">1</module></schema>'))
    with pytest.raises(PmlError, match="expected text behind the last module"):
        store.render('<prompt schema="s" xml:space="preserve"><a/> </prompt>')


@pytest.mark.parametrize("mode", ["modular", "exact"])
def test_too_many_turns_are_refused(mode: Mode) -> None:
    turns = "<assistant>a</assistant><user>b</user>" * (MAX_TURNS // 2)
    with pytest.raises(PmlError, match=f"prompt:1:1: found {MAX_TURNS + 2} turns, expected"):
        store_of(TRIP, "separate turns").render(f"?{turns}", schema="trip", mode=mode)


def test_turns_in_another_way_than_those_of_the_schema_are_refused() -> None:
    store = store_of(
        '<schema name="s"><module name="a"><system>x</system></module><user>y</user></schema>',
        "default system prompt",
    )
    store.render("<a/>?", schema="s")
    with pytest.raises(PmlError, match="in another way than those of its schema"):
        store.render("?", schema="s")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ('<prompt schema="trap"/>', "unknown schema 'trap'; known: trip; did you mean trip?"),
        (
            '<prompt schema="trip"><hotal/>?</prompt>',
            "unknown module <hotal>; known there: plan, h",
        ),
        ('<prompt schema="trip"><sea/>?</prompt>', "write <plan><sea/></plan>"),
        ('<prompt schema="trip"><hotel/><hotel/>?</prompt>', "imported twice"),
        ('<prompt schema="trip"><plan><sea/><city/></plan>?</prompt>', "members of one union"),
        (
            '<prompt schema="trip"><plan day="1"/>?</prompt>',
            "parameters are days; did you mean days",
        ),
        ('<prompt schema="trip"><hotel x="1"/>?</prompt>', "unknown parameter 'x'; it has none"),
        (
            '<prompt schema="trip"><plan days="123456"/>?</prompt>',
            "has 6 tokens, the schema allows 5",
        ),
        ('<prompt schema="trip"><user>?</user><hotel/></prompt>', "stands before a module"),
        ('<prompt schema="trip"><hotel/><assistant>?</assistant></prompt>', "to be the user's"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt: str, message: str) -> None:
    with pytest.raises(PmlError, match="prompt:1:") as caught:
        store_of(TRIP, "separate turns").render(prompt)
    assert message in str(caught.value)


def test_prompts_that_end_in_a_module_or_are_too_long_are_refused() -> None:
    schema = '<schema name="s"><module name="a">12345</module></schema>'
    with pytest.raises(PmlError, match="expected text behind the last module"):
        store_of(schema).render('<prompt schema="s"><a/></prompt>')
    with pytest.raises(PmlError, match="has no turns"):
        store_of(schema).render('<prompt schema="s"><a/><user>x</user></prompt>')
    store = store_of(schema, max_model_len=66)
    store.render('<prompt schema="s"><a/>?</prompt>')
    with pytest.raises(PmlError, match="takes 66 tokens with padding .* and positions up to 7"):
        store.render('<prompt schema="s"><a/>??</prompt>')


@pytest.mark.parametrize("template", [None, "separate turns"])
@pytest.mark.parametrize("mode", ["modular", "repair"])
def test_modules_alone_are_a_prompt_to_pin(template: str | None, mode: Mode) -> None:
    schema = TRIP if template else '<schema name="trip"><module name="hotel">12</module>3</schema>'
    plan = '<plan days="2"><sea/></plan>' if template else ""
    asked = f'<prompt schema="trip">{plan}<hotel/>{{}}</prompt>'
    store = store_of(schema, template)
    pinned = store.render(asked.format(" \n"), mode=mode, to_pin=True)
    answered = store.render(asked.format("Where?"), mode=mode)
    assert pinned.plan is not None and answered.plan is not None
    assert pinned.plan.segments == answered.plan.segments
    assert pinned.plan.num_stored_slots < len(pinned.token_ids)
    # what it has behind its modules is left as it is
    assert store.render(asked.format("Where?"), mode=mode, to_pin=True) == answered


def test_turns_that_a_template_cannot_render_are_refused() -> None:
    with pytest.raises(SchemaError, match="refuses the turns user, user: turns must alternate"):
        store_of('<schema name="s"><user>a</user><user>b</user></schema>', "system inside user")
    with pytest.raises(SchemaError, match="in a member of a union"):
        store_of(
            '<schema name="s"><union><module name="a"><user>a</user></module></union></schema>',
            "separate turns",
        )


SEEDS = st.integers(0, 2**32)


@settings(max_examples=cases(75))
@example(seed=144906, mode="modular", template=None)
@given(
    seed=SEEDS,
    mode=st.sampled_from(["modular", "repair"]),
    template=st.sampled_from([None, *MARKUPS]),
)
def test_random_prompts_mean_what_the_reference_says(
    seed: int, mode: Mode, template: str | None
) -> None:
    """Which tokens a plan computes, at which positions, and which ones they see."""
    rng = np.random.default_rng(seed)
    store = SchemaStore(character_tokenizer(template), block_size=32)
    words = ["a", "b", "c", "d", "e"]
    schema = SchemaMaker(rng, words, 6).schema("s", has_turns=template is not None)
    store.add(schema)
    text = random_prompt(rng, schema, words)
    repair_tokens = 3 if mode == "repair" else None
    rendered = store.render(text, mode=mode, repair_tokens=repair_tokens)
    tokens = store.text_tokens
    markup = MARKUPS[template] if template else None
    meaning = Meaning(
        schema, parse_prompt(text), tokens, tokens.placeholder, tokens.beginning,
        repair_tokens or 0, markup,
    )  # fmt: skip
    plan = rendered.plan
    assert plan is not None
    plan.check()
    assert ModulePlan.of_argument(plan.to_argument()) == plan
    assert rendered.end_position == meaning.tokens[-1].position + 1
    new = [token for token in meaning.tokens if token.owner is None]
    assert rendered.token_ids[plan.num_stored_slots :] == [token.id for token in new]
    assert plan.positions_from(0, len(new)) == [token.position for token in new]
    slot_of = _slots(plan, meaning.tokens)
    computed = {slot_of[id(token)]: token for token in new}
    for first, end, visible in plan.computed_runs():
        hidden = plan.hidden_slots(visible)
        seen = {s for s in range(end) if not any(a <= s < b for a, b in hidden)}
        for slot in range(first, end):
            token = computed[slot]
            before = meaning.tokens[: _index(meaning.tokens, token)]
            expected = {slot_of[id(each)] for each in before if meaning.sees(token, each)}
            assert {s for s in seen if s < slot} == expected
    for index, segment in enumerate(plan.segments):
        _check_encoding(plan, index, meaning, slot_of)
        own = [
            t for t in meaning.tokens if t.owner is not None and "/".join(t.owner) == segment.name
        ]
        assert segment.positions(segment.num_tokens) == [t.position for t in own]


def _index(tokens: list[Token], token: Token) -> int:
    return next(index for index, each in enumerate(tokens) if each is token)


def _slots(plan: ModulePlan, tokens: list[Token]) -> dict[int, int]:
    """Of each token by its identity."""
    next_slot = {
        segment.name: first for segment, first in zip(plan.segments, plan.first_slots, strict=False)
    }
    next_new = plan.num_stored_slots
    slots = {}
    for token in tokens:
        if token.owner is None:
            slots[id(token)] = next_new
            next_new += 1
        else:
            name = "/".join(token.owner)
            slots[id(token)] = next_slot[name]
            next_slot[name] += 1
    return slots


def _check_encoding(
    plan: ModulePlan, index: int, meaning: Meaning, slot_of: dict[int, int]
) -> None:
    """The plan by which a segment is computed shows it what it may see, and no more."""
    encoding = plan.encoding_plan(index)
    assert encoding.encodes
    moved: dict[int, int] = {}  # slots of the encoding request by those of the prompt
    at = 0
    for first, end in plan.encoding_slots(index):
        moved.update((slot, at + slot - first) for slot in range(first, end))
        at += end - first
    assert at == encoding.num_prompt_slots
    [(first, end, visible)] = encoding.computed_runs()
    hidden = encoding.hidden_slots(visible)
    name = plan.segments[index].name
    for place, token in enumerate(meaning.tokens):
        if token.owner is None or "/".join(token.owner) != name:
            continue
        slot = moved[slot_of[id(token)]]
        assert first <= slot < end
        seen = {s for s in range(slot) if not any(a <= s < b for a, b in hidden)}
        before = meaning.tokens[:place]
        assert seen == {moved[slot_of[id(t)]] for t in before if meaning.sees(token, t)}
