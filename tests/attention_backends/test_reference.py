# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.attention_backends.strategies import DTYPES, random_problem
from tests.support.depth import cases
from vllm_relay.attention_backends import reference

INF = math.inf
SEEDS = st.integers(0, 2**32 - 1)


def attend(query, key, value, **keywords):
    """Reference attention of one request; query [n, heads, D], key and value [kv, kv_heads, D]."""
    kv_tokens, num_kv_heads, head_size = key.shape
    num_blocks = 1 + -(-kv_tokens // 32)
    kv_cache = torch.full((num_blocks, num_kv_heads, 32, 2 * head_size), torch.nan, dtype=key.dtype)
    block_ids = torch.randperm(num_blocks - 1) + 1
    positions = torch.arange(kv_tokens)
    slots = block_ids[positions // 32] * 32 + positions % 32
    reference.write_kv_cache(key, value, kv_cache, slots)
    return reference.relay_attention(
        query,
        kv_cache,
        block_ids[None].int(),
        torch.tensor([0, len(query)], dtype=torch.int32),
        torch.tensor([kv_tokens], dtype=torch.int32),
        num_kv_heads=num_kv_heads,
        output_dtype=torch.float64,
        **keywords,
    )


def by_hand(query, key, value, scale, window=None, slopes=None, cap=None, sinks=None):
    """The same in loops over tokens and heads, from the textbook."""
    n, num_heads, head_size = query.shape
    kv_tokens, num_kv_heads, _ = key.shape
    output, lse = np.zeros((n, num_heads, head_size)), np.full((n, num_heads), -INF)
    for i in range(n):
        position = kv_tokens - n + i
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            weights, total = [], 0.0 if sinks is None else math.exp(sinks[head])
            for other in range(position + 1):
                if window and position - other >= window:
                    continue
                dot = sum(
                    float(q) * float(k)
                    for q, k in zip(query[i, head], key[other, kv_head], strict=True)
                )
                score = dot * scale
                if cap:
                    score = cap * math.tanh(score / cap)
                if slopes is not None:
                    score += float(slopes[head]) * (other - position)
                weights.append((other, math.exp(score)))
                total += math.exp(score)
            for other, weight in weights:
                output[i, head] += weight / total * value[other, kv_head].double().numpy()
            lse[i, head] = math.log(total) if total else -INF
    return torch.from_numpy(output), torch.from_numpy(lse)


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 48, 256])
@pytest.mark.parametrize("block_size", [32, 96])
def test_packed_layout(dtype, head_size, block_size):
    num_blocks, num_kv_heads = 3, 2
    unit = 2 if dtype == torch.bfloat16 else 1
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    key = torch.randn(shape, generator=generator).to(dtype)
    value = torch.randn(shape, generator=generator).to(dtype)
    kv_cache = reference.pack_kv_cache(key, value)
    assert kv_cache.shape == (num_blocks, num_kv_heads, block_size, 2 * head_size)
    areas = kv_cache.flatten(2)
    b, h, t, d = (
        index.flatten() for index in torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    )
    key_index = ((t // 16 * (head_size // unit) + d // unit) * 16 + t % 16) * unit + d % unit
    value_index = ((d // 16 * (block_size // unit) + t // unit) * 16 + d % 16) * unit + t % unit
    assert torch.equal(areas[b, h, key_index], key.flatten())
    assert torch.equal(areas[b, h, block_size * head_size + value_index], value.flatten())

    unpacked_key, unpacked_value = reference.unpack_kv_cache(kv_cache)
    assert torch.equal(unpacked_key, key) and torch.equal(unpacked_value, value)

    written = torch.full_like(kv_cache, torch.nan)
    slots = torch.randperm(num_blocks * block_size, generator=generator)
    reference.write_kv_cache(
        key.transpose(1, 2).flatten(0, 1)[slots],
        value.transpose(1, 2).flatten(0, 1)[slots],
        written,
        slots,
    )
    assert torch.equal(written, kv_cache)


def test_write_skips_negative_slots_and_leaves_the_others():
    kv_cache = torch.full((3, 1, 32, 64), -7.0)
    key = torch.arange(3.0)[:, None, None].expand(3, 1, 32)
    reference.write_kv_cache(key, key + 10, kv_cache, torch.tensor([33, -1, 95]))
    written_key, written_value = reference.unpack_kv_cache(kv_cache)
    assert (written_key[1, 0, 1] == 0).all() and (written_value[1, 0, 1] == 10).all()
    assert (written_key[2, 0, 31] == 2).all() and (written_value[2, 0, 31] == 12).all()
    assert (kv_cache == -7).sum() == kv_cache.numel() - 4 * 32


def test_write_refuses_other_dtypes():
    kv_cache = torch.zeros(2, 1, 32, 64)
    key = torch.zeros(1, 1, 32, dtype=torch.float16)
    with pytest.raises(TypeError, match="float16"):
        reference.write_kv_cache(key, key, kv_cache, torch.tensor([3]))


@settings(max_examples=cases(25))
@given(SEEDS)
def test_equals_sdpa_in_float64(seed):
    problem = random_problem(np.random.default_rng(seed))
    problem.features.pop("logits_soft_cap", None)
    features = problem.features
    output, _ = problem.solve(reference.relay_attention, output_dtype=torch.float64)
    assert output.isfinite().all()
    all_keys, all_values = reference.unpack_kv_cache(problem.kv_cache)
    _, num_heads, head_size = problem.query.shape
    window = features.get("sliding_window", 10**9)
    sinks = features.get("sinks", torch.full((num_heads,), -INF)).double()
    slopes = features.get("alibi_slopes", torch.zeros(num_heads)).double()
    for request, seq_len in enumerate(problem.seq_lens.tolist()):
        begin, end = problem.query_start_loc[request : request + 2].tolist()
        if begin == end:
            continue
        first = max(0, seq_len - (end - begin) - window + 1)
        seen = torch.arange(first, seq_len)
        blocks = problem.block_table[request, seen // problem.block_size].long()
        key = all_keys[blocks, :, seen % problem.block_size].double().transpose(0, 1)
        value = all_values[blocks, :, seen % problem.block_size].double().transpose(0, 1)
        distance = seen - torch.arange(seq_len - (end - begin), seq_len)[:, None]
        bias = slopes[:, None, None] * distance
        bias = bias.masked_fill((distance > 0) | (distance <= -window), -INF)
        # a sink is a key with score zero, its logit as bias, and value zero
        nothing = torch.zeros(problem.num_kv_heads, 1, head_size, dtype=torch.float64)
        expected = scaled_dot_product_attention(
            problem.query[begin:end].double().transpose(0, 1)[None],
            torch.cat([nothing, key], dim=1)[None],
            torch.cat([nothing, value], dim=1)[None],
            attn_mask=torch.cat([sinks[:, None, None].expand(-1, end - begin, 1), bias], dim=2),
            scale=problem.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        tolerance = 1e-12 * max(1.0, float(value.abs().max()))
        torch.testing.assert_close(output[begin:end], expected, rtol=1e-9, atol=tolerance)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1), (8, 2), (7, 1)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 1},
        {"window": 7},
        {"window": 40},
        {"slopes": True},
        {"cap": 0.5},
        {"sinks": True},
        {"window": 9, "slopes": True, "cap": 2.0, "sinks": True},
    ],
    ids=str,
)
def test_equals_textbook(heads, features):
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(num_heads)
    query = torch.randn(4, num_heads, 32, generator=generator)
    key, value = (torch.randn(37, num_kv_heads, 32, generator=generator) for _ in range(2))
    slopes = 2.0 ** -torch.arange(1.0, num_heads + 1) if features.get("slopes") else None
    sinks = torch.linspace(-1, 3, num_heads) if features.get("sinks") else None
    window, cap = features.get("window"), features.get("cap")
    result = attend(
        query,
        key,
        value,
        scale=0.3,
        sliding_window=window,
        alibi_slopes=slopes,
        logits_soft_cap=cap,
        sinks=sinks,
    )
    close(result, by_hand(query, key, value, 0.3, window, slopes, cap, sinks))


def test_one_visible_token_gives_its_value():
    query, key, value = torch.randn(1, 4, 32), torch.randn(70, 2, 32), torch.randn(70, 2, 32)
    output, lse = attend(query, key, value, scale=2.0, sliding_window=1)
    close(output[0], value[-1].double().repeat_interleave(2, 0))
    score = (query[0].double() * key[-1].double().repeat_interleave(2, 0)).sum(-1) * 2
    close(lse[0], score)


def test_equal_scores_give_the_mean_value_and_log_of_the_count():
    value = torch.randn(50, 1, 32)
    output, lse = attend(torch.randn(1, 1, 32), torch.zeros(50, 1, 32), value, scale=1.0)
    close(output[0, 0], value[:, 0].double().mean(0))
    close(lse, torch.full((1, 1), math.log(50), dtype=torch.float64))


def test_sink_alone_and_nothing_at_all():
    arguments = (
        torch.randn(2, 2, 32),
        torch.full((1, 1, 32, 64), torch.nan),
        torch.zeros(1, 0, dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
    )
    keywords = {"scale": 1.0, "num_kv_heads": 1}
    output, lse = reference.relay_attention(*arguments, **keywords)
    assert (output == 0).all() and (lse == -INF).all()
    sinks = torch.tensor([-3.0, 2.0])
    output, lse = reference.relay_attention(*arguments, **keywords, sinks=sinks)
    assert (output == 0).all() and torch.equal(lse, sinks.expand(2, 2))


def test_dtypes_of_results_and_out():
    problem = random_problem(np.random.default_rng(3), dtype=torch.bfloat16)
    output, lse = problem.solve(reference.relay_attention)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact, exact_lse = problem.solve(reference.relay_attention, output_dtype=torch.float64)
    assert exact.dtype == exact_lse.dtype == torch.float64
    assert torch.equal(output, exact.bfloat16()) and torch.equal(lse, exact_lse.float())
    out = torch.empty_like(problem.query)
    returned, _ = problem.solve(reference.relay_attention, out=out)
    assert returned is out and torch.equal(out, output)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="num_kv_heads"):
        attend(torch.zeros(1, 3, 32), torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), scale=1.0)


def random_state(generator, dtype=torch.float64):
    output = torch.randn(5, 3, 32, generator=generator, dtype=dtype)
    return output, 30 * torch.randn(5, 3, generator=generator, dtype=torch.float64)


def empty_state(like, lse=-INF):
    return torch.zeros_like(like[0]), torch.full_like(like[1], lse)


def test_merge_is_commutative_and_associative():
    generator = torch.Generator().manual_seed(0)
    a, b, c = (random_state(generator) for _ in range(3))
    close(reference.merge_states(*a, *b), reference.merge_states(*b, *a))
    left = reference.merge_states(*reference.merge_states(*a, *b), *c)
    right = reference.merge_states(*a, *reference.merge_states(*b, *c))
    close(left, right)


@pytest.mark.parametrize("infinity", [-INF, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_state_is_neutral(infinity, dtype):
    state = random_state(torch.Generator().manual_seed(1), dtype)
    empty = empty_state(state, infinity)
    for merged in (
        reference.merge_states(*state, *empty),
        reference.merge_states(*empty, *state),
    ):
        assert torch.equal(merged[0], state[0]) and torch.equal(merged[1], state[1])


@pytest.mark.parametrize("infinities", [(-INF, -INF), (-INF, INF), (INF, -INF), (INF, INF)])
def test_two_empty_states_are_empty(infinities):
    output = torch.full((2, 3, 32), torch.nan)
    lse_a, lse_b = (torch.full((2, 3), infinity) for infinity in infinities)
    merged, lse = reference.merge_states(output, lse_a, output, lse_b)
    assert (merged == 0).all() and (lse == -INF).all()


def test_output_of_an_empty_state_is_not_looked_at():
    state = random_state(torch.Generator().manual_seed(2))
    garbage = torch.full_like(state[0], torch.nan), torch.full_like(state[1], -INF)
    assert torch.equal(reference.merge_states(*state, *garbage)[0], state[0])


def test_extreme_lse_do_not_overflow():
    output = torch.ones(1, 1, 32)
    for lse_a, lse_b in [(3e38, -3e38), (3e38, 3e38), (-3e38, -3e38), (1e4, 1e4 + 1)]:
        merged, lse = reference.merge_states(
            output, torch.tensor([[lse_a]]), output, torch.tensor([[lse_b]])
        )
        assert torch.allclose(merged, output) and lse.isfinite().all()


@settings(max_examples=cases(13))
@given(SEEDS)
def test_merging_two_halves_of_the_keys_gives_the_whole(seed):
    rng = np.random.default_rng(seed)
    query = torch.from_numpy(rng.standard_normal((1, 4, 32)))
    key, value = (torch.from_numpy(rng.standard_normal((2, 60, 2, 32))[i]) for i in range(2))
    query, key, value = query.float(), key.float(), value.float()
    cut = int(rng.integers(1, 60))
    first = attend(query, key[:cut], value[:cut], scale=0.2)
    second = attend(query, key[cut:], value[cut:], scale=0.2)
    close(reference.merge_states(*first, *second), attend(query, key, value, scale=0.2))
