# SPDX-License-Identifier: Apache-2.0
"""What only blocks of adjacent tokens promise; what every index does is in test_index.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.answers import assert_damage_is_found, assert_exact, assert_same, recall
from tests.sparse.kernel_variants import KERNELS, kernel
from tests.sparse.key_sets import KINDS, TRAPS, key_set, trap
from tests.support import reference
from tests.support.depth import cases
from vllm_relay.sparse.index.blocks import REPRESENTATIVES, BlockIndex
from vllm_relay.sparse.index.elements import DTYPES
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

Arrays = dict[str, np.ndarray]
BLOCK_TOKENS = (16, 32, 80)

each_representative = pytest.mark.parametrize("representative", REPRESENTATIVES)


def rows_of(blocks: np.ndarray, num_rows: int) -> np.ndarray:
    """[num_rows, bytes] of codes that lie in blocks of sixteen."""
    lanes = blocks.reshape(len(blocks), -1, 16, 4).transpose(0, 2, 1, 3)
    return lanes.reshape(len(blocks) * 16, -1)[:num_rows]


def with_largest_padding(index: BlockIndex) -> BlockIndex:
    """The same index; past the last key, the last block and the head size, codes that would win."""
    settings_, arrays = index.to_arrays()
    d, padded = index.head_size, dict(arrays)
    for name, num_rows in (("blocks", index.num_keys), ("representatives", index.num_blocks)):
        padded[name] = arrays[name].copy()
        for part in padded[name].reshape(-1, -(-num_rows // 16), padded[name].shape[-1]):
            lanes = part.reshape(len(part), -1, 16, 4)
            lanes[-1, :, num_rows - 16 * (len(part) - 1) :] = 255
            past = np.arange(d, 4 * lanes.shape[1])
            lanes[:, past // 4, :, past % 4] = 255
    return BlockIndex.from_arrays(settings_, padded)


@each_representative
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_width_finds_most(kind: str, representative: str) -> None:
    """Measured with 150 training queries for a recall of 0.95 at k = 100."""
    data = key_set(kind, 3000, 64)
    index = BlockIndex(16, representative).build(data.keys, data.train)
    truth, _ = reference.search(data.queries, data.keys, TopK(100))
    found = [index.search(row[None], TopK(100)).ids[0] for row in data.queries]
    assert recall(found, truth) >= 0.9
    assert 1 <= index.default_width <= index.num_blocks


def test_a_context_that_drifts_needs_few_blocks() -> None:
    rng = np.random.default_rng(0)
    keys = np.cumsum(rng.standard_normal((4096, 32)), axis=0).astype(np.float32)
    for representative in REPRESENTATIVES:
        index = BlockIndex(16, representative).build(keys)
        query = TopK(30, width=16)
        truth, _ = reference.search(keys[:20], keys, query)
        result = index.search(keys[:1], query)
        assert recall(result.ids, truth[:1]) >= 0.95
        assert result.stats.hops == 16
        num_representatives = index.num_blocks * (2 if representative == "bounds" else 1)
        assert result.stats.distances == num_representatives + 16 * 16


@settings(max_examples=cases(15))
@given(
    seed=st.integers(0, 2**32),
    n=st.one_of(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 79, 81]), st.integers(1, 700)),
    d=st.one_of(st.sampled_from([1, 3, 63, 65, 130, 255, 256]), st.integers(1, 256)),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
)
def test_no_key_has_a_larger_product_than_its_bound(
    seed: int, n: int, d: int, block_tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    keys, _ = trap(TRAPS[rng.integers(len(TRAPS))], rng, n, d, 1, dtype=DTYPES[rng.integers(3)])
    index = BlockIndex(block_tokens, "bounds").build(keys)
    arrays = index.to_arrays()[1]
    codes = rows_of(arrays["blocks"], n).astype(np.int64)
    largest, smallest = (
        rows_of(part, index.num_blocks).astype(np.int64) for part in arrays["representatives"]
    )
    queries = rng.integers(-127, 128, (5, codes.shape[1]))
    bounds = np.maximum(queries, 0) @ largest.T + np.minimum(queries, 0) @ smallest.T
    inside = np.setdiff1d(np.arange(n), arrays["outside"])
    blocks = inside // block_tokens
    assert (queries @ codes[inside].T <= bounds[:, blocks]).all()
    for block in np.unique(blocks):  # and no bound is further away than it has to be
        members = codes[inside[blocks == block]]
        assert np.array_equal(largest[block], members.max(axis=0))
        assert np.array_equal(smallest[block], members.min(axis=0))


def test_means_are_those_of_the_keys_with_codes() -> None:
    data = key_set("outliers", 1000, 40)
    index = BlockIndex(32, "mean").build(data.keys)
    arrays = index.to_arrays()[1]
    assert len(arrays["outside"]) == 5
    codes = rows_of(arrays["blocks"], 1000).astype(float)
    means = rows_of(arrays["representatives"][0], index.num_blocks)
    for block, mean in enumerate(means):
        members = np.setdiff1d(np.arange(32 * block, min(1000, 32 * block + 32)), arrays["outside"])
        assert np.abs(mean - codes[members].mean(axis=0)).max() <= 0.5


def random_query(rng: np.random.Generator, n: int, spread: float) -> QueryType:
    if rng.random() < 0.5:
        return TopK(int(rng.choice([1, 2, 10, n // 2 + 1, n + 5])))
    return Dipr(beta=spread * float(rng.choice([0.0, 0.1, 0.5, 3.0])))


@settings(max_examples=cases(30))
@given(
    seed=st.integers(0, 2**32),
    n=st.one_of(st.sampled_from([1, 2, 15, 16, 17, 79, 81]), st.integers(1, 1500)),
    d=st.one_of(st.sampled_from([1, 3, 63, 65, 255, 256]), st.integers(1, 256)),
    g=st.integers(1, 9),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
)
def test_exact_answers_are_those_of_a_scan(
    seed: int, n: int, d: int, g: int, block_tokens: int
) -> None:
    """Bit for bit; and at full width, where k is all of the keys, so are those of the others."""
    rng = np.random.default_rng(seed)
    name, dtype = TRAPS[rng.integers(len(TRAPS))], DTYPES[rng.integers(3)]
    keys, queries = trap(name, rng, n, d, g, dtype=dtype)
    flat = FlatIndex().build(keys)
    exact = BlockIndex(block_tokens, "bounds", exact=True).build(keys)
    begin, prefix_len = sorted(rng.integers(0, n + 1, 2).tolist())
    if rng.random() < 0.4:
        begin, prefix_len = 0, n
    counting = {"begin": begin, "prefix_len": prefix_len}
    scores = reference.scores_of(queries, keys.to_float32())
    spread = float(np.ptp(scores))
    query = random_query(rng, n, spread)
    window: Any = None
    if isinstance(query, Dipr) and rng.random() < 0.5:
        window = scores.max(axis=1) + spread * rng.uniform(-1, 1, g)
    found = exact.search(queries, query, window_max=window, **counting)
    assert_same(found, flat.search(queries, query, window_max=window, **counting))
    everything = TopK(n, width=n)
    expected = flat.search(queries, everything, **counting)
    for representative in REPRESENTATIVES:
        index = BlockIndex(block_tokens, representative).build(keys)
        assert_same(index.search(queries, everything, **counting), expected)


def test_an_exact_search_ends_when_no_unread_block_can_have_an_answer() -> None:
    rng = np.random.default_rng(0)
    keys = np.cumsum(rng.standard_normal((20_000, 16)), axis=0).astype(np.float32)
    index = BlockIndex(16, "bounds", exact=True).build(keys)
    flat = FlatIndex().build(keys)
    queries = rng.standard_normal((4, 16)).astype(np.float32)
    for query in (TopK(50), TopK(50, width=1), Dipr(beta=1.0)):
        result = index.search(queries, query)
        assert_same(result, flat.search(queries, query))
        assert 4 <= result.stats.hops <= index.num_blocks // 4
        assert result.stats.bytes < flat.search(queries, query).stats.bytes / 2


@each_representative
@pytest.mark.parametrize("kind", KINDS)
def test_more_blocks_find_more(kind: str, representative: str) -> None:
    data = key_set(kind, 3000, 64)
    index = BlockIndex(16, representative).build(data.keys)
    widths = (1, 10, 40, index.num_blocks, 10 * index.num_blocks)
    results = [index.search(data.queries[:1], TopK(20, width=width)) for width in widths]
    assert [result.stats.hops for result in results[1:]] == [10, 40, *2 * [index.num_blocks]]
    costs = [result.stats.distances for result in results]
    assert costs == sorted(costs) and costs[0] < 500
    assert_same(results[-1], results[-2])
    best = [result.scores[0][-1] for result in results]
    assert best == sorted(best)


@each_representative
@pytest.mark.parametrize(("begin", "prefix_len"), [(0, None), (100, 900), (5, 17), (999, 1000)])
def test_blocks_are_read_until_they_hold_enough(
    begin: int, prefix_len: int | None, representative: str
) -> None:
    data = key_set("random", 1000, 32)
    index = BlockIndex(16, representative).build(data.keys)
    for k in (1, 100, 2000):
        query = TopK(k, width=1)
        result = index.search(data.queries[:3], query, begin=begin, prefix_len=prefix_len)
        assert [len(ids) for ids in result.ids] == 3 * [min(k, (prefix_len or 1000) - begin)]


def test_a_prefix_takes_no_width_for_blocks_that_have_none_of_its_keys() -> None:
    data = key_set("random", 4000, 32)
    for representative in REPRESENTATIVES:
        index = BlockIndex(16, representative).build(data.keys)
        for begin, end in ((0, 1), (0, 5), (3999, 4000), (15, 17), (2000, 2003), (160, 3000)):
            query = TopK(4000, width=(end - 1) // 16 - begin // 16 + 1)
            result = index.search(data.queries[:3], query, begin=begin, prefix_len=end)
            assert [np.sort(ids).tolist() for ids in result.ids] == 3 * [list(range(begin, end))]
        assert result.stats.distances < 2 * len(data.keys)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("places", [[0], [15, 16], list(range(32, 48)), [3, 150, 151, 198]])
def test_keys_outside_are_scored_whatever_is_read(places: list[int], exact: bool) -> None:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((200, 32)).astype(np.float32)
    keys[places] *= 1e5
    index = BlockIndex(16, "bounds", exact=exact).build(keys)
    assert index._codes.outside.tolist() == places
    index.check()
    queries = np.stack([keys[places].sum(axis=0) / 1e5, -keys[places].sum(axis=0) / 1e5])
    for prefix in (None, places[-1], places[-1] + 1):
        for query in (TopK(200, width=13), TopK(len(places)), Dipr(beta=3.0)):
            result = index.search(queries, query, prefix_len=prefix)
            all_read = exact or query.width == 13
            if all_read:
                assert_exact(result, queries, keys, query, prefix_len=prefix)
            truth, _ = reference.search(queries[:1], keys, TopK(1), prefix_len=prefix)
            if prefix != places[-1] or len(places) > 1:
                assert np.isin(truth[0], places).all() and truth[0] in result.ids[0]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (17, 33), (1003, 72), (4097, 130)])
def test_what_lies_past_the_last_key_is_not_looked_at(n: int, d: int, exact: bool) -> None:
    rng = np.random.default_rng(n)
    keys = rng.standard_normal((n, d)).astype(np.float32)
    queries = np.abs(rng.standard_normal((5, d))).astype(np.float32)  # the largest codes win
    for representative in ("bounds",) if exact else REPRESENTATIVES:
        for block_tokens in BLOCK_TOKENS:
            index = BlockIndex(block_tokens, representative, exact=exact).build(keys)
            poisoned = with_largest_padding(index)
            with pytest.raises(IndexDamagedError, match="do not belong"):
                poisoned.check()
            for query in (TopK(3, width=1), TopK(n, width=n), Dipr(beta=2.0, width=2)):
                for prefix_len in (None, n // 2):
                    found, expected = (
                        each.search(queries, query, prefix_len=prefix_len)
                        for each in (poisoned, index)
                    )
                    assert_same(found, expected)
                    assert found.stats == expected.stats


@pytest.mark.parametrize("fast", [name for name in KERNELS if name != "portable"])
@pytest.mark.parametrize("d", [1, 63, 64, 129, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_answer_alike_by_bounds(fast: str, d: int, exact: bool) -> None:
    """Over whole numbers, whose sums do not round; means are in test_kernels.py."""
    rng = np.random.default_rng(d)
    keys = rng.integers(-8, 9, (1003, d)).astype(np.float32)
    queries = rng.integers(-8, 9, (20, d)).astype(np.float32)
    built = BlockIndex(32, "bounds", exact=exact).build(keys)
    indexes = []
    for name in (fast, "portable"):
        with kernel(name):
            indexes.append(BlockIndex.from_arrays(*built.to_arrays()))
    for query in (TopK(1), TopK(37, width=5), TopK(500, width=20), Dipr(beta=float(d))):
        for group in (1, 3, 20):
            for prefix_len in (None, 501, 17):
                a, b = (
                    index.search(queries[:group], query, prefix_len=prefix_len) for index in indexes
                )
                assert a.stats == b.stats
                assert_same(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_tokens": 0}, "block_tokens is 0, expected a multiple of 16 up to 4096"),
        ({"block_tokens": 24}, "block_tokens is 24"),
        ({"block_tokens": 8192}, "block_tokens is 8192"),
        ({"block_tokens": 16.0}, "block_tokens is 16.0"),
        ({"representative": "median"}, "representative is 'median', expected one of bounds, mean"),
        ({"exact": 1}, "exact is 1"),
        ({"exact": True}, "exact is True with representative 'mean', expected True with bounds"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BlockIndex(**arguments)


def codes_of_another_key(arrays: Arrays) -> None:
    arrays["blocks"][0] ^= 1


def a_block_missing(arrays: Arrays) -> None:
    arrays["blocks"] = arrays["blocks"][:-1].copy()


def a_lower_bound(arrays: Arrays) -> None:
    arrays["representatives"][0, 0, 0] -= 1


def a_higher_bound(arrays: Arrays) -> None:
    arrays["representatives"][1, 0, 0] += 1


def bounds_the_wrong_way_round(arrays: Arrays) -> None:
    arrays["representatives"] = arrays["representatives"][::-1].copy()


def one_bound_only(arrays: Arrays) -> None:
    arrays["representatives"] = arrays["representatives"][:1].copy()


def signed_bounds(arrays: Arrays) -> None:
    arrays["representatives"] = arrays["representatives"].view(np.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (codes_of_another_key, "codes do not belong to its keys"),
        (a_block_missing, "do not fit together"),
        (a_lower_bound, "representatives are not those of its blocks"),
        (a_higher_bound, "representatives are not those of its blocks"),
        (bounds_the_wrong_way_round, "representatives are not those of its blocks"),
        (one_bound_only, "do not fit together"),
        (signed_bounds, "do not fit together"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_damage_is_found(damage: Callable[[Arrays], None], message: str, exact: bool) -> None:
    keys = key_set("random", 90, 10).keys
    index = BlockIndex(16, "bounds", exact=exact).build(keys)
    assert_damage_is_found(index, damage, message)


@pytest.mark.parametrize(
    "change",
    [
        {"block_tokens": 32},
        {"block_tokens": 17},
        {"block_tokens": None},
        {"representative": "mean"},
        {"exact": "yes"},
        {"default_width": 0},
        {"default_width": 10**20},
        {"default_width": 1.5},
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    keys = key_set("random", 900, 10).keys
    settings_, arrays = BlockIndex(16, "bounds").build(keys).to_arrays()
    with pytest.raises(IndexDamagedError):
        BlockIndex.from_arrays(settings_ | change, arrays).check()
    without = {name: value for name, value in settings_.items() if name not in change}
    with pytest.raises(IndexDamagedError, match="is missing or unusable"):
        BlockIndex.from_arrays(without, arrays)


def test_a_saved_index_keeps_how_it_searches(tmp_path: Any) -> None:
    data = key_set("rope", 700, 48)
    for number, index in enumerate(
        (BlockIndex(48), BlockIndex(32, "bounds"), BlockIndex(16, "bounds", exact=True))
    ):
        index.build(data.keys, data.train).save(tmp_path / str(number))
        loaded = BlockIndex.load(tmp_path / str(number))
        loaded.check()
        assert (loaded.block_tokens, loaded.representative, loaded.exact) == (
            index.block_tokens, index.representative, index.exact,
        )  # fmt: skip
        for query in (TopK(20), Dipr(beta=4.0), TopK(3, width=2)):
            found, expected = (each.search(data.queries, query) for each in (loaded, index))
            assert_same(found, expected)
            assert found.stats == expected.stats
