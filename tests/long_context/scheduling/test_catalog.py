# SPDX-License-Identifier: Apache-2.0
"""Which contexts the scheduler knows, and which of them a prompt begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.long_context.orders import DELETED, ContextReport
from vllm_relay.long_context.scheduling.catalog import ContextCatalog, ContextRecord
from vllm_relay.long_context.scheduling.host_memory import HostMemory

SEQUENCES = st.lists(st.integers(0, 2), max_size=8)


def catalog_of(**contexts: list[int]) -> ContextCatalog:
    catalog = ContextCatalog()
    for context_id, tokens in contexts.items():
        catalog.add(ContextRecord(context_id, np.array(tokens)))
    return catalog


def by_last_use(catalog: ContextCatalog) -> list[str]:
    return [each.id for each in sorted(catalog, key=lambda each: each.last_use)]


def test_contexts_come_and_go() -> None:
    catalog = catalog_of(a=[1, 2], b=[3])
    assert len(catalog) == 2 and "a" in catalog and "c" not in catalog
    catalog.remove("a")
    catalog.remove("a")
    assert len(catalog) == 1 and "a" not in catalog
    assert catalog.longest_prefix(np.array([1, 2])) == (None, 0)


def test_the_one_used_least_recently_is_first() -> None:
    catalog = catalog_of(a=[1], b=[2], c=[3])
    assert by_last_use(catalog) == ["a", "b", "c"]
    catalog.use("a")
    assert by_last_use(catalog) == ["b", "c", "a"]
    catalog.use("b")
    catalog.add(ContextRecord("d", np.array([4])))
    assert by_last_use(catalog) == ["c", "a", "b", "d"]


def test_those_of_clients_leave_first() -> None:
    catalog = catalog_of(a=[1], b=[2])
    for context_id in "cde":
        catalog.add(ContextRecord(context_id, np.array([ord(context_id)]), is_clients=True))
    catalog.use("c")
    assert [each.id for each in catalog.in_leaving_order() if each.is_clients] == ["d", "e", "c"]
    assert [each.id for each in catalog.in_leaving_order()] == ["d", "e", "c", "a", "b"]
    catalog["e"].is_clients = False
    assert [each.id for each in catalog.in_leaving_order()] == ["d", "c", "a", "b", "e"]


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
    catalog = catalog_of(first=[*range(5)], other=[*range(1, 5)])
    second = ContextRecord("second", np.arange(7), catalog["first"])
    catalog.add(second)
    catalog.add(ContextRecord("third", np.arange(9), second))
    assert by_last_use(catalog) == ["other", "third", "second", "first"]
    catalog.use("other")
    catalog.use("second")
    assert by_last_use(catalog) == ["third", "other", "second", "first"]
    catalog.remove("second")
    catalog.use("third")  # what it continues is there as before
    assert by_last_use(catalog) == ["other", "third", "first"]


def report(context_id: str, parent_id: str | None = None, **fields: Any) -> ContextReport:
    given = {"num_tokens": 9, "state": "stored", "memory_bytes": 0, "file_bytes": 0} | fields
    return ContextReport(context_id, parent_id=parent_id, **given)


def test_of_a_chain_each_file_counts_as_long_as_something_needs_it() -> None:
    catalog = catalog_of(a=[1], b=[1, 2], c=[1, 2, 3])
    chain = [
        report("c", "b", file_bytes=100),
        report("b", "a", file_bytes=10),
        report("a", file_bytes=1),
    ]
    catalog.update(chain, num_ranks=2)
    assert catalog.file_bytes == 222
    catalog.remove("b")
    assert catalog.file_bytes == 222
    # it is kept again: the same file
    catalog.add(ContextRecord("b", np.array([1, 2])))
    catalog.update(chain, num_ranks=2)
    assert catalog.file_bytes == 222 and catalog["c"].parent is catalog["b"]
    for context_id in "bac":
        catalog.remove(context_id)
    assert catalog.file_bytes == 0


def test_files_of_links_that_were_deleted_before_count() -> None:
    catalog = catalog_of(c=[1, 2, 3])
    deleted = {"state": DELETED, "file_bytes": 10}
    catalog.update([report("c", "b", file_bytes=1), report("b", "a", **deleted)], 1)
    assert catalog.file_bytes == 11 and len(catalog) == 1 and "b" not in catalog
    catalog.update([report("a", **deleted), report("b", "a", **deleted)], 1)
    assert catalog.file_bytes == 21


def test_a_context_that_takes_over_what_it_continued_needs_it_no_more() -> None:
    catalog = catalog_of(a=[1], b=[1, 2, 3])
    catalog.update(
        [
            report("a", file_bytes=10, num_own_tokens=1),
            report("b", "a", state="indexing", memory_bytes=5, num_own_tokens=2),
        ],
        num_ranks=1,
    )
    assert catalog["b"].num_own_tokens == 2
    memory = HostMemory(100, 1, catalog)
    catalog.update([report("b", file_bytes=30, memory_bytes=7, num_own_tokens=3)], num_ranks=1)
    assert catalog["b"].parent is None and catalog["b"].num_own_tokens == 3
    catalog["a"].memory.num_bytes = 20
    assert catalog.file_bytes == 40 and memory.context_bytes == 27
    catalog.remove("a")
    assert catalog.file_bytes == 30 and memory.context_bytes == 7


def test_what_is_known_for_its_problem_only_is_read_by_nobody() -> None:
    catalog = catalog_of(a=[1, 2], b=[1])
    catalog.update([report("a", state="memory", problem="is not kept: NaN")], num_ranks=1)
    assert "a" in catalog
    assert catalog.longest_prefix(np.array([1, 2, 3])) == ("b", 1)
    catalog.update([report("a", state="memory", problem="no space", memory_bytes=1)], num_ranks=1)
    assert catalog.longest_prefix(np.array([1, 2, 3])) == ("a", 2)
