# SPDX-License-Identifier: Apache-2.0
"""Long values that rows share become prompt modules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import answered, runner
from vllm_relay.tables.engines.base import Completion, Completions, Prompt
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.prompts.modules.prompts import ModuleCache
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

BLOCK_SIZE_TOKENS = 8
MARKUP = "<b>{user} & \"it\" </b>]]>\n\t<user/>&lt; {{x}} </prompt> [1, 2] \\ 'ß'"
TOKENIZER = byte_tokenizer(CHAT_TEMPLATE)
BASE_TOKENIZER = byte_tokenizer()
QUESTION = Question("Does {user} like {product}?", ("user", "product", "review"), max_tokens=8)


@dataclass
class ModuleEngine(FakeEngine):
    """Takes prompts with modules."""

    modules_refusal: str | None = None


class UnreadModuleEngine(ModuleEngine):
    """Answers prompts whatever they are."""

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for prompt in prompts:
            self.prompts.append(prompt)
            yield Completion(prompt.number, "answer")


def module_engine(max_model_len: int | None = 20_000, tokenizer: Any = TOKENIZER) -> ModuleEngine:
    return ModuleEngine(
        tokenizer=tokenizer,
        cache=BlockCache(BLOCK_SIZE_TOKENS, 10_000),
        max_model_len=max_model_len,
    )


def table(**columns: Sequence[Any]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.register("given", pa.table(columns))
    connection.execute("CREATE TABLE t AS SELECT * FROM given")
    return connection


def reviews(num_users: int = 4, num_products: int = 4, length: int = 60) -> Any:
    """A row for each user and product, with a text of its own."""
    pairs = list(itertools.product(range(num_users), range(num_products)))
    return table(
        user=[f"user {user} {MARKUP}{'u' * (length + user)}" for user, _ in pairs],
        product=[f"{'p' * (length + 3 * product)} {MARKUP} {product}" for _, product in pairs],
        review=[f"review {user} of {product}" for user, product in pairs],
    )


def asked(
    connection: duckdb.DuckDBPyConnection,
    question: Question = QUESTION,
    engine: ModuleEngine | None = None,
    modules: str = "modular",
    **options: Any,
) -> list[Prompt]:
    """The prompts of a job, which have the fields of their rows or are too long."""
    engine = engine or module_engine()
    job = runner(connection, engine, modules=modules, **options)
    connection.execute("DROP TABLE IF EXISTS out")
    job.answer("FROM t", question, "out")
    for row in answered(connection):
        *values, answer, error = row
        if error is not None:
            assert "the engine takes prompts of fewer than" in error
            continue
        found = {name: json.loads(text) for name, text in json.loads(answer).items()}
        for name, value in zip(question.fields, values, strict=True):
            if name in question.set_fields and value is not None:
                assert sorted(found[name]) == sorted(value)
            else:
                assert found[name] == value
    return engine.prompts


def templated(prompt: Prompt, tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return prompt.message
    turns = [{"role": "user", "content": prompt.message}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def modules_of(prompt: Prompt) -> dict[tuple[int, int], str]:
    """Texts of the stored segments but the first, by first position and end."""
    assert prompt.modules is not None and prompt.modules.plan is not None
    plan = prompt.modules.plan
    found = {}
    for index, segment in enumerate(plan.segments[1:], 1):
        [(offset, position)] = segment.position_runs
        assert offset == 0 and segment.context == ((0, plan.segments[0].num_tokens),)
        tokens = plan.segment_tokens(index, prompt.modules.token_ids)
        found[position, segment.end_position] = TOKENIZER.decode(tokens)
    return found


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BASE_TOKENIZER])
@pytest.mark.parametrize("modules", ["modular", "repair"])
def test_prompts_hold_the_same_text(tokenizer: Any, modules: str) -> None:
    prompts = asked(reviews(), engine=module_engine(tokenizer=tokenizer), modules=modules)
    assert len(prompts) == 16
    for prompt in prompts:
        assert prompt.modules is not None and prompt.modules.plan is not None
        assert tokenizer.decode(prompt.token_ids) == templated(prompt, tokenizer)
        # in the order of slots the same tokens, those of modules first
        seen = prompt.modules.plan.seen_tokens(prompt.modules.token_ids)
        assert sorted(seen) == sorted(prompt.token_ids)
        if modules == "modular":
            assert tokenizer.decode(seen[-5:]) == tokenizer.decode(prompt.token_ids[-5:])
        assert len(modules_of(prompt)) == 2
    texts = {text for prompt in prompts for text in modules_of(prompt).values()}
    assert len(texts) == 8
    assert all(json.dumps(MARKUP, ensure_ascii=False)[1:-1] in text for text in texts)


def test_a_module_has_one_position() -> None:
    places: dict[str, set[tuple[int, int]]] = {}
    for prompt in asked(reviews()):
        ends = [0]
        for place, text in modules_of(prompt).items():
            places.setdefault(text, set()).add(place)
            assert place[0] >= ends[-1]
            ends.append(place[1])
    assert len(places) == 8
    assert all(len(each) == 1 for each in places.values())


def test_what_is_short_or_not_shared_stays_text() -> None:
    pairs = list(itertools.product(range(4), range(4)))
    connection = table(
        kind=["short" for _ in pairs],
        user=[f"user {user} {'u' * 50}" for user, _ in pairs],
        product=[f"product {product} {'p' * 50}" for _, product in pairs],
        review=[f"review {user} of {product} {'r' * 90}" for user, product in pairs],
    )
    question = Question("What?", ("kind", "user", "product", "review"), max_tokens=8)
    for prompt in asked(connection, question):
        texts = list(modules_of(prompt).values())
        assert [text[:6] for text in texts] == ['"user"', '"produ']


def test_a_value_of_one_row_stays_text() -> None:
    connection = reviews()
    connection.execute("UPDATE t SET product = repeat('x', 99) WHERE review = 'review 0 of 0'")
    for prompt in asked(connection):
        assert len(modules_of(prompt)) == (1 if "xxx" in prompt.message else 2)


def test_without_a_gain_over_prefixes_there_are_no_modules() -> None:
    connection = table(
        product=[f"product {row % 4} {'p' * 80}" for row in range(40)],
        review=[f"review {row}" for row in range(40)],
    )
    question = Question("What?", ("product", "review"), max_tokens=8)
    assert all(prompt.modules is None for prompt in asked(connection, question))


@pytest.mark.parametrize("order", ["auto", "keep", "fixed", "per_row"])
def test_rows_run_in_their_chosen_order(order: str) -> None:
    connection = reviews()
    numbers = [
        [prompt.number for prompt in asked(connection, modules=modules, order=order)]
        for modules in ("off", "modular")
    ]
    assert numbers[0] == numbers[1]


def test_null_is_no_module() -> None:
    connection = reviews()
    connection.execute("UPDATE t SET product = NULL WHERE product LIKE '% 0'")
    counts = sorted(len(modules_of(prompt)) for prompt in asked(connection))
    assert counts == [1] * 4 + [2] * 12


@pytest.mark.parametrize("limit", [300, 420, 480, 520, 600, 800, 1500])
@pytest.mark.parametrize("modules", ["modular", "repair"])
def test_prompts_fit_the_model(limit: int, modules: str) -> None:
    connection = reviews()
    connection.execute("UPDATE t SET product = product || repeat('x', 90) WHERE product LIKE '% 2'")
    for prompt in asked(connection, engine=module_engine(limit), modules=modules):
        if prompt.modules is not None:
            assert prompt.modules.min_model_len + QUESTION.max_tokens <= limit
        assert len(prompt.token_ids) < limit


def test_one_long_value_does_not_keep_others_from_being_modules() -> None:
    connection = reviews(length=60)
    connection.execute("UPDATE t SET product = repeat('x', 1300) WHERE product LIKE '% 2'")
    prompts = asked(connection, engine=module_engine(1600))
    assert sum(prompt.modules is not None for prompt in prompts) >= 12
    assert all(len(modules_of(prompt)) == 2 for prompt in prompts if "xxx" not in prompt.message)


@pytest.mark.parametrize("limit", [900, 20_000])
def test_an_element_of_sets_has_one_place_in_all_rows(limit: int) -> None:
    passages = [f"passage {number} {MARKUP} {'t' * (5 * number)}" for number in range(9)]
    rows = [list(each) for each in itertools.combinations(passages, 3)]
    for row in rows[::2]:
        row.reverse()
    connection = table(found=rows, claim=[f"claim {number}" for number in range(len(rows))])
    question = Question("True?", ("found", "claim"), max_tokens=8, set_fields=("found",))
    places: dict[str, set[tuple[int, int]]] = {}
    for prompt in asked(connection, question, module_engine(limit)):
        if prompt.modules is None:
            continue
        assert TOKENIZER.decode(prompt.token_ids) == templated(prompt, TOKENIZER)
        found = modules_of(prompt)
        assert sorted(found) == list(found)
        for (_, end), (begin, _) in itertools.pairwise(found):
            assert end < begin
        for place, text in found.items():
            places.setdefault(text, set()).add(place)
    assert all(len(each) == 1 for each in places.values())
    if limit == 20_000:
        assert {json.loads(text) for text in places} == set(passages)


def test_odd_sets() -> None:
    long = [f"{number} {'t' * 70}" for number in range(4)]
    rows = [[long[0], long[0]], [], None, [long[1], "short"], [long[0], long[1], long[2]],
            [long[2], long[3], "short"], [long[3], long[0]], [long[1], long[3]], ["short"],
            ]  # fmt: skip
    connection = table(found=rows, claim=[f"claim {number}" for number in range(len(rows))])
    question = Question("True?", ("found", "claim"), max_tokens=8, set_fields=("found",))
    prompts = asked(connection, question)
    assert sum(prompt.modules is not None for prompt in prompts) == 6


@settings(max_examples=cases(10), deadline=None)
@given(
    data=st.data(),
    order=st.sampled_from(["auto", "keep", "fixed", "per_row"]),
    modules=st.sampled_from(["modular", "repair"]),
    limit=st.sampled_from([250, 500, 20_000]),
    field=st.sampled_from(['"{name}": {json}\n', "{name} = {text};", "{name}: {json}\n\n"]),
)
def test_any_table(data: st.DataObject, order: str, modules: str, limit: int, field: str) -> None:
    texts = [f"{MARKUP[:number]}{'a' * 12 * number} {number}" for number in range(5)]
    cell = st.none() | st.sampled_from(texts)
    row = st.tuples(cell, cell, st.none() | st.lists(st.sampled_from(texts), max_size=4))
    rows = data.draw(st.lists(row, min_size=1, max_size=16))
    columns: dict[str, Any] = {
        "a": pa.array([each[0] for each in rows], pa.string()),
        "b": pa.array([each[1] for each in rows], pa.string()),
        "c": pa.array([each[2] for each in rows], pa.list_(pa.string())),
    }
    question = Question("What?", ("a", "b", "c"), max_tokens=4, set_fields=("c",))
    asking = UnreadModuleEngine(
        answer=lambda fields: "",
        tokenizer=TOKENIZER,
        cache=BlockCache(BLOCK_SIZE_TOKENS, 10_000),
        max_model_len=limit,
    )
    job = runner(
        table(**columns), asking, order=order, modules=modules, template=PromptTemplate(field=field)
    )
    job.answer("FROM t", question, "out")
    for prompt in asking.prompts:
        assert TOKENIZER.decode(prompt.token_ids) == templated(prompt, TOKENIZER)
        if prompt.modules is not None:
            assert prompt.modules.min_model_len + 4 <= limit
            modules_of(prompt)


def test_answers_with_modules_are_kept_apart(tmp_path: Path) -> None:
    checkpoint = tmp_path / "answers"
    connection = reviews()
    num_known = []
    for number, modules in enumerate(["off", "modular", "repair", "modular", "off"]):
        job = runner(connection, module_engine(), checkpoint, modules=modules)
        job.answer("FROM t", QUESTION, f"out{number}")
        num_known.append(job.report.num_known)
        job.close()
    assert num_known == [0, 0, 0, 16, 16]


def test_the_estimate_counts_each_module_once() -> None:
    connection = reviews()
    job = runner(connection, module_engine(), modules="modular")
    estimate = job.estimate("FROM t", QUESTION)
    prompts = asked(connection)
    assert estimate.num_modular == estimate.num_prompts == 16
    assert estimate.prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts)
    segments = {}
    num_stored = 0
    for prompt in prompts:
        assert prompt.modules is not None and prompt.modules.plan is not None
        for segment in prompt.modules.plan.segments:
            segments[segment.name] = segment.num_tokens
            num_stored += segment.num_tokens
    assert len(segments) == 9
    assert estimate.cached_tokens == num_stored - sum(segments.values())
    off = runner(connection, module_engine()).estimate("FROM t", QUESTION)
    assert off.num_modular == 0 and off.cached_tokens is not None
    assert off.cached_tokens < estimate.cached_tokens


@pytest.mark.parametrize("lazy", [False, True])
def test_an_engine_that_takes_none_is_refused(lazy: bool) -> None:
    connection = reviews()
    plain = FakeEngine(tokenizer=TOKENIZER)
    job = runner(connection, LazyEngine(lambda: plain) if lazy else plain, modules="repair")
    for ask in (
        lambda: job.answer("FROM t", QUESTION, "out"),
        lambda: job.estimate("FROM t", QUESTION),
    ):
        with pytest.raises(ValueError, match='attention_backend="relay".*"scheduler": True'):
            ask()
    assert not plain.prompts


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="modules='fast' given, expected one of"):
        runner(duckdb.connect(), module_engine(), modules="fast")


def test_modules_that_were_used_longest_ago_leave_the_cache() -> None:
    cache = ModuleCache(10)
    assert cache.use({1: 4, 2: 2}, 1) == [1, 2]
    assert cache.use({1: 4, 3: 3}, 1) == [3]
    assert cache.use({1: 4}, 2) == []
    assert cache.use({2: 2, 3: 3}, 1) == [2]
    assert cache.use({1: 4}, 1) == [1]
    unlimited = ModuleCache(None)
    assert [len(unlimited.use({number: 9}, 9)) for number in (1, 2, 3, 1, 2, 3)] == [1] * 3 + [
        0
    ] * 3
