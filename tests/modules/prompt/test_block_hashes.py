# SPDX-License-Identifier: Apache-2.0
"""Equal names for blocks with equal keys and values, and for no others."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import pytest
from msgspec.structs import replace

from tests.modules.prompt.test_render import store_of
from vllm_relay.modules.prompt.block_hashes import PlannedHashes
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.modules.prompt.schema_store import SchemaStore

A, B, C = "a" * 40, "b" * 10, "c" * 70
SCHEMA = (
    '<schema name="s"><scaffold modules="a c"/>In.<module name="a">{a}<param name="p" len="3"/>'
    '</module><module name="b">{b}</module><module name="c">{c}<module name="d">{b}</module>'
    "</module></schema>"
)


def digest(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()


def names(
    store: SchemaStore, body: str, extra_keys: tuple[Any, ...] = (), generated: int = 0, **how: Any
) -> tuple[dict[str, list[bytes]], list[bytes]]:
    """The hashes of the blocks of each segment, and of the tail."""
    rendered = store.render(f'<prompt schema="s">{body}</prompt>', **how)
    plan = rendered.plan
    assert plan is not None
    hashes = PlannedHashes(plan, rendered.token_ids, digest, extra_keys)
    tokens = rendered.token_ids + [7] * generated
    found: list[bytes] = []
    for number in range(len(tokens) // plan.block_size):
        block = tokens[number * plan.block_size : (number + 1) * plan.block_size]
        found.append(hashes.block(number, block, found[-1] if found else None))
    size = plan.block_size
    segments = {
        segment.name: found[plan.first_slots[i] // size : plan.first_slots[i + 1] // size]
        for i, segment in enumerate(plan.segments)
    }
    return segments, found[plan.num_stored_slots // size :]


@pytest.fixture
def store() -> SchemaStore:
    return store_of(SCHEMA.format(a=A, b=B, c=C))


def test_a_module_has_its_names_wherever_it_is_imported(store: SchemaStore) -> None:
    first, _ = names(store, "<a/><b/>" + "x" * 40)
    second, _ = names(store, '<b/><a p="123"/><c/>y' + "x" * 40)
    assert [len(first[name]) for name in ("", "a", "b")] == [1, 2, 1]
    assert all(first[name] == second[name] for name in first)
    assert len({each for blocks in second.values() for each in blocks}) == 7


def test_what_a_module_sees_is_in_its_names(store: SchemaStore) -> None:
    alone, _ = names(store, "<c><d/></c>?")
    beside, _ = names(store, "<a/><c><d/></c>?")  # a scaffold
    assert not {*alone["c"], *alone["c/d"]} & {*beside["c"], *beside["c/d"]}
    other = store_of(SCHEMA.format(a=A, b=B, c=C).replace("In.", "On."))
    assert not {*names(other, "<c/>?")[0]["c"]} & {*alone["c"]}
    # as long as the text before it: other positions
    moved = store_of(SCHEMA.format(a=A, b=B + "b", c=C))
    assert not {*names(moved, "<c/>?")[0]["c"]} & {*alone["c"]}
    assert names(moved, "<a/>?")[0]["a"] == beside["a"]


def test_a_longer_module_begins_with_the_same_blocks(store: SchemaStore) -> None:
    longer = store_of(SCHEMA.format(a=A, b=B, c=C + "c" * 30))
    c, longer_c = names(store, "<c/>?")[0]["c"], names(longer, "<c/>?")[0]["c"]
    assert c[:2] == longer_c[:2] and c[2] != longer_c[2]


def test_adapters_and_salts_have_names_of_their_own(store: SchemaStore) -> None:
    plain, tail = names(store, "<a/>" + "x" * 40)
    salted, salted_tail = names(store, "<a/>" + "x" * 40, (("cache_salt", "s"),))
    assert not {*plain["a"], *plain[""], *tail} & {*salted["a"], *salted[""], *salted_tail}


def test_tails_are_named_after_all_they_see(store: SchemaStore) -> None:
    text = "x" * 64
    first = names(store, "<a/>" + text)[1]
    assert len(first) == 2
    assert names(store, "<a/>" + text + "more")[1] == first
    assert not {*names(store, "<b/>" + text)[1]} & {*first}
    assert not {*names(store, text)[1]} & {*first}
    assert not {*names(store, "<a/>" + text, mode="repair", repair_tokens=3)[1]} & {*first}


def test_a_conversation_goes_on_where_its_answer_ended(store: SchemaStore) -> None:
    """Generated tokens and the same tokens in a later prompt have the same names."""
    rendered = store.render('<prompt schema="s"><a/>xyz</prompt>')
    plan = rendered.plan
    assert plan is not None
    run = replace(plan.tail[-1], num_tokens=plan.tail[-1].num_tokens + 40)
    later = ModulePlan(block_size=32, segments=plan.segments, tail=(*plan.tail[:-1], run))
    tokens = rendered.token_ids + [7] * 40
    found = []
    for each in (plan, later):
        hashes = PlannedHashes(each, tokens[: each.num_prompt_slots], digest, ())
        first = each.num_stored_slots
        found.append(hashes.block(first // 32, tokens[first : first + 32], None))
    assert found[0] == found[1]
