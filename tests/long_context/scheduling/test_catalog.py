# SPDX-License-Identifier: Apache-2.0
"""Which contexts the scheduler knows, and which of them a prompt begins with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.long_context.scheduling.catalog import ContextCatalog

SEQUENCES = st.lists(st.integers(0, 2), max_size=8)


def catalog_of(**contexts: list[int]) -> ContextCatalog:
    catalog = ContextCatalog()
    for context_id, tokens in contexts.items():
        catalog.add(context_id, np.array(tokens))
    return catalog


def test_contexts_come_and_go() -> None:
    catalog = catalog_of(a=[1, 2], b=[3])
    assert len(catalog) == 2 and "a" in catalog and "c" not in catalog
    catalog.remove("a")
    catalog.remove("a")
    assert len(catalog) == 1 and "a" not in catalog
    assert catalog.longest_prefix(np.array([1, 2])) == (None, 0)


def test_the_one_used_least_recently_is_first() -> None:
    catalog = catalog_of(a=[1], b=[2], c=[3])
    assert catalog.by_last_use() == ["a", "b", "c"]
    catalog.use("a")
    assert catalog.by_last_use() == ["b", "c", "a"]
    catalog.use("b")
    catalog.add("d", np.array([4]))
    assert catalog.by_last_use() == ["c", "a", "b", "d"]


def test_those_of_clients_leave_first() -> None:
    catalog = catalog_of(a=[1], b=[2])
    for context_id in "cde":
        catalog.add(context_id, np.array([ord(context_id)]), is_clients=True)
    catalog.use("c")
    assert [each.id for each in catalog.of_clients()] == ["d", "e", "c"]
    assert catalog.in_leaving_order() == ["d", "e", "c", "a", "b"]
    catalog.give_to_operator("e")
    assert catalog.in_leaving_order() == ["d", "c", "a", "b", "e"]


def test_a_context_that_is_not_known_cannot_be_used() -> None:
    with pytest.raises(KeyError):
        ContextCatalog().use("a")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4], ("long", 4)),
        ([1, 2, 3, 9], ("middle", 3)),  # as much as of the long one
        ([1, 2, 9], ("short", 2)),
        ([1], ("short", 1)),
        ([7, 8, 9], ("other", 1)),
        ([9, 1, 2, 3], (None, 0)),
        ([], (None, 0)),
    ],
)
def test_of_equal_prefixes_the_shortest_context_is_taken(
    prompt: list[int], expected: tuple[str | None, int]
) -> None:
    contexts = {"long": [1, 2, 3, 4, 5], "middle": [1, 2, 3], "short": [1, 2], "other": [7, 1]}
    for names in (list(contexts), list(reversed(contexts))):
        catalog = catalog_of(**{name: contexts[name] for name in names})
        assert catalog.longest_prefix(np.array(prompt, np.int64)) == expected


@given(st.lists(SEQUENCES, max_size=6), SEQUENCES)
def test_no_context_shares_more_tokens(contexts: list[list[int]], prompt: list[int]) -> None:
    catalog = catalog_of(**{str(number): tokens for number, tokens in enumerate(contexts)})
    found, length = catalog.longest_prefix(np.array(prompt, np.int64))
    shared = [
        next(
            (
                at
                for at, (ours, theirs) in enumerate(zip(tokens, prompt, strict=False))
                if ours != theirs
            ),
            min(len(tokens), len(prompt)),
        )
        for tokens in contexts
    ]
    assert length == max(shared, default=0)
    if found is None:
        assert length == 0
    else:
        best = [len(tokens) for tokens, own in zip(contexts, shared, strict=True) if own == length]
        assert shared[int(found)] == length and len(contexts[int(found)]) == min(best)


def test_what_others_continue_is_used_with_them() -> None:
    """It leaves after them: before, nothing would be freed."""
    catalog = ContextCatalog()
    catalog.add("first", np.arange(5))
    catalog.add("other", np.arange(1, 5))
    catalog.add("second", np.arange(7), "first")
    catalog.add("third", np.arange(9), "second")
    assert catalog.by_last_use() == ["other", "third", "second", "first"]
    catalog.use("other")
    catalog.use("second")
    assert catalog.by_last_use() == ["third", "other", "second", "first"]
    catalog.remove("second")
    catalog.use("third")
    assert catalog.by_last_use() == ["other", "first", "third"]
