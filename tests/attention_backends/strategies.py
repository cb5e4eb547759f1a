# SPDX-License-Identifier: Apache-2.0
"""Random attention problems, and how exact their solutions have to be."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.forest import Forest, build_forest
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DATA_KINDS = ("random", "peaky", "very peaky", "growing", "constant", "zeros", "large values")
ROUNDING_KERNELS = ("amx_bf16", "amx_bf16_emulated", "avx512_bf16_rounded")
"""Kernels whose denominator sums weights that were rounded to bf16."""
MAX_DEPTH = 6
MAX_GROUPS = 8


@dataclass(frozen=True)
class AttentionProblem:
    """One batch. Slots which no query token sees hold NaN, and so does the null block."""

    query: torch.Tensor  # [tokens, heads, head_size]
    kv_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    block_table: torch.Tensor  # int32 [requests, max_blocks]
    query_start_loc: torch.Tensor  # int32 [requests + 1]
    seq_lens: torch.Tensor  # int32 [requests]
    scale: float
    num_kv_heads: int
    features: dict[str, Any]  # sliding_window, alibi_slopes, logits_soft_cap, sinks: those in use
    description: str

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def query_lens(self) -> torch.Tensor:
        return self.query_start_loc.diff()

    def arguments(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Positional and keyword arguments of `relay_attention`."""
        positional = (
            self.query,
            self.kv_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
        )
        return positional, {
            "scale": self.scale,
            "num_kv_heads": self.num_kv_heads,
            **self.features,
        }

    def solve(self, function: Any, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse that `function`, a relay_attention, gives for this problem."""
        positional, keywords = self.arguments()
        return function(*positional, **{**keywords, **overrides})

    @cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse in float64, computed once: afterwards nothing is written to the tensors,
        and other ones make another problem."""
        return self.solve(reference.relay_attention, output_dtype=torch.float64)

    @cached_property
    def weighted_magnitudes(self) -> torch.Tensor:
        """sum(weight * |value|) in float64 [tokens, heads, head_size], computed once as well."""
        magnitudes = self.kv_cache.clone()
        magnitudes.flatten(2).tensor_split(2, dim=2)[1].abs_()  # values are the second half
        return replace(self, kv_cache=magnitudes).expected[0]

    @cached_property
    def largest_keys(self) -> torch.Tensor:
        """Their norms, float64 [num_kv_heads], computed once as well."""
        key, _ = reference.unpack_kv_cache(self.kv_cache)
        return key.float().norm(dim=-1).nan_to_num().amax(dim=(0, 2)).double()

    def forest(self) -> Forest:
        """Everything that is shared, whether it pays or not."""
        query_lens = self.query_lens.numpy()
        visible_to_all = np.where(query_lens > 0, self.seq_lens.numpy() - query_lens + 1, 0)
        block_ids = self.block_table.numpy()
        if hidden := self.features.get("hidden"):
            block_ids = hidden.visible_block_ids(block_ids, self.block_size)
        return build_forest(block_ids, visible_to_all, self.block_size)

    def token_indices(self, requests: np.ndarray) -> torch.Tensor:
        """Where the query tokens of `requests` stand in this batch, in this order."""
        starts = self.query_start_loc.tolist()
        ranges = [np.arange(starts[r], starts[r + 1]) for r in requests]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ranges]))

    def select(self, requests: np.ndarray) -> "AttentionProblem":
        """The batch of these requests, in this order."""
        index = torch.as_tensor(requests, dtype=torch.int64)
        query_start_loc = torch.zeros(len(index) + 1, dtype=torch.int32)
        query_start_loc[1:] = self.query_lens[index].cumsum(0)
        features = dict(self.features)
        if hidden := features.get("hidden"):
            ranges = {
                place: hidden.ranges[request]
                for place, request in enumerate(index.tolist())
                if request in hidden.ranges
            }
            features["hidden"] = HiddenTokens(ranges)
        return replace(
            self,
            features=features,
            query=self.query[self.token_indices(requests)],
            block_table=self.block_table[index],
            query_start_loc=query_start_loc,
            seq_lens=self.seq_lens[index],
        )


def random_problem(
    rng: np.random.Generator,
    *,
    max_tokens: int = 1024,
    max_requests: int = 12,
    dtype: torch.dtype | None = None,
    data: str | None = None,
    use_features: bool = True,
    hides_tokens: bool = False,
    heads: tuple[int, int] | None = None,
    head_size: int | None = None,
    block_size: int | None = None,
) -> AttentionProblem:
    """A batch of requests whose block tables form a random forest.

    Args:
        rng: the only source of randomness.
        max_tokens: size of the KV cache; a request is about as long at most.
        max_requests: the batch may also be empty.
        dtype: of query and KV cache, any of `DTYPES` unless given.
        data: one of `DATA_KINDS`, any unless given.
        use_features: whether sliding window, ALiBi, soft cap and sinks may appear.
        hides_tokens: whether tokens are hidden, instead of sliding window and ALiBi.
        heads: query heads and kv heads, random unless given, as the two sizes.
    """
    dtype = dtype or DTYPES[rng.integers(len(DTYPES))]
    data = data or DATA_KINDS[rng.integers(len(DATA_KINDS))]
    head_size = head_size or int(rng.integers(2, 17)) * 16
    if heads is None:
        num_kv_heads = min(int(rng.integers(1, 5)), max(1, 512 // head_size))
        heads = num_kv_heads * int(rng.integers(1, 9)), num_kv_heads
    block_size = block_size or int(rng.choice([32, 64, 96, 128], p=[0.7, 0.1, 0.1, 0.1]))
    num_requests = int(rng.integers(max_requests + 1, size=2).max())

    rows = _random_rows(rng, num_requests, num_blocks=max(1, max_tokens // block_size))
    seq_lens, query_lens = _random_lengths(rng, rows, block_size)
    num_blocks = 1 + max(1, max_tokens // block_size) + num_requests
    width = max(map(len, rows), default=0) + int(rng.integers(3))
    block_table = rng.integers(0, num_blocks, (num_requests, width), dtype=np.int32)  # stale ids
    for request, row in enumerate(rows):
        block_table[request, : len(row)] = row
    features = _random_features(rng, heads[0], max_tokens) if use_features else {}
    if hides_tokens:
        features.pop("sliding_window", None)
        features.pop("alibi_slopes", None)
        features["hidden"] = _random_hidden(rng, rows, seq_lens - query_lens, block_size)
    if window := features.get("sliding_window"):
        unseen_tokens = np.maximum(seq_lens - query_lens - window + 1, 0)
        for request in np.flatnonzero(rng.random(num_requests) < 0.5):
            block_table[request, : unseen_tokens[request] // block_size] = 0
    return problem_of_table(
        rng,
        block_table,
        seq_lens,
        query_lens,
        num_blocks=num_blocks,
        dtype=dtype,
        data=data,
        features=features,
        heads=heads,
        head_size=head_size,
        block_size=block_size,
        scale=head_size**-0.5 * float(rng.choice([1.0, 1.0, 0.3, 2.0])),
    )


def problem_of_table(
    rng: np.random.Generator,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    *,
    num_blocks: int,
    dtype: torch.dtype,
    data: str,
    features: dict[str, Any],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    scale: float | None = None,
) -> AttentionProblem:
    """A batch with these block tables and random data; arguments are those of `random_problem` and
    the fields of `AttentionProblem`."""
    num_heads, num_kv_heads = heads
    window = features.get("sliding_window")
    hidden = features.get("hidden", HiddenTokens({}))
    slots, positions = _visible_slots(block_table, seq_lens, query_lens, block_size, window, hidden)
    key, value, query = _random_data(
        rng,
        data,
        positions,
        (len(slots), num_kv_heads, head_size),
        (int(query_lens.sum()), num_heads, head_size),
    )
    kv_cache = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_size), torch.nan)
    kv_cache = kv_cache.to(dtype)
    reference.write_kv_cache(key.to(dtype), value.to(dtype), kv_cache, torch.from_numpy(slots))
    scale = scale or head_size**-0.5
    sizes = f"heads {num_heads}/{num_kv_heads} head_size {head_size} block_size {block_size}"
    return AttentionProblem(
        query=query.to(dtype),
        kv_cache=kv_cache,
        block_table=torch.from_numpy(block_table),
        query_start_loc=torch.from_numpy(np.append(0, np.cumsum(query_lens)).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        scale=scale,
        num_kv_heads=num_kv_heads,
        features=features,
        description=(
            f"{str(dtype).removeprefix('torch.')} {sizes} data {data!r} scale {scale:.4f} "
            f"seq_lens {seq_lens.tolist()} query_lens {query_lens.tolist()} "
            f"features {sorted(features)} window {window}"
        ),
    )


def in_fp8(problem: AttentionProblem) -> tuple[AttentionProblem, AttentionProblem]:
    """With a cache in fp8, NaN where there was NaN, and with the same numbers in the dtype of the
    queries: both are packed alike."""
    cache = problem.kv_cache.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return (
        replace(problem, kv_cache=cache),
        replace(problem, kv_cache=cache.to(problem.query.dtype)),
    )


def error_bounds(
    problem: AttentionProblem, *, sums_rounded_weights: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a kernel may be from the float64 result, for each output element and each lse.

    Scores are fp32 sums of head_size products, so that random rounding errors leave
    sqrt(head_size) units of |q| |k| scale, of which four are allowed; soft cap, ALiBi and exp add a
    few units of the largest number they see. An error d of the scores changes lse by d, and each
    weight by the factor exp(2 d). The matrix unit takes weights rounded to the dtype of the
    cache, and the output is rounded to it: each costs one unit roundoff of sum(weight * |value|),
    and sums over the keys a few fp32 units of the same.

    Args:
        sums_rounded_weights: the kernel's denominator sums the weights after their rounding. Then
            lse is off by one unit roundoff of the dtype too, and the rounding of a weight moves
            the output by (value - output), which is up to two units of sum(weight * |value|).

    Returns:
        output_bound: float64 [tokens, heads, head_size].
        lse_bound: float64 [tokens, heads].
    """
    fp32_unit = 2.0**-24
    unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
    tokens, num_heads, head_size = problem.query.shape
    _, lse = problem.expected
    largest_key = problem.largest_keys.repeat_interleave(num_heads // problem.num_kv_heads)
    largest_score = problem.query.double().norm(dim=-1) * largest_key * problem.scale
    largest_term = largest_score + 16
    if "alibi_slopes" in problem.features:
        longest = problem.seq_lens.max() if tokens else 0
        largest_term = largest_term + problem.features["alibi_slopes"] * longest
    if "logits_soft_cap" in problem.features:
        largest_term = largest_term + problem.features["logits_soft_cap"]
    score_error = fp32_unit * (4 * head_size**0.5 * largest_score + 8 * largest_term)

    rounding = (3 if sums_rounded_weights else 2) * unit[problem.query.dtype] + 64 * fp32_unit
    relative = rounding + torch.expm1(2 * score_error)
    smallest = torch.finfo(problem.query.dtype).tiny  # below it rounding is absolute, or to zero
    output_bound = relative[..., None] * problem.weighted_magnitudes + smallest
    lse_bound = score_error + fp32_unit * (64 + lse.abs().nan_to_num(posinf=0.0))
    if sums_rounded_weights:
        lse_bound = lse_bound + unit[problem.query.dtype]
    return output_bound, lse_bound


def _random_rows(rng: np.random.Generator, num_requests: int, num_blocks: int) -> list[list[int]]:
    """Shared beginnings of block table rows, then blocks of each request's own, at least one."""
    # ids from 1 on; the last num_requests ones are kept so that nobody ends up without a block
    ids = rng.permutation(num_blocks + num_requests) + 1
    own_ids, ids = ids[:num_requests].tolist(), ids[num_requests:].tolist()
    rows: list[list[int]] = [[] for _ in range(num_requests)]

    def grow(members: list[int], levels: int) -> None:
        for _ in range(min(int(rng.choice([1, 1, 1, 2, 3])), len(ids))):
            block = ids.pop()
            for member in members:
                rows[member].append(block)
        if levels > 1:
            num_children = int(rng.choice([1, 1, 2, 3]))
            child_of = rng.choice([-1, 0, 0, 0, 1, 2], len(members)) % num_children
            leaves_here = rng.random(len(members)) < 0.1
            leaves_here[rng.integers(len(members))] |= num_children == 1
            for child in range(num_children):
                if chosen := np.flatnonzero((child_of == child) & ~leaves_here).tolist():
                    grow([members[position] for position in chosen], levels - 1)

    depth = int(rng.integers(MAX_DEPTH + 1))
    num_groups = int(rng.choice([0, 1, 1, 1, 2, 2, 3, MAX_GROUPS]))
    group = rng.integers(-1, num_groups, num_requests)  # -1 is in no group
    for root in range(num_groups) if depth else ():
        if members := np.flatnonzero(group == root).tolist():
            grow(members, depth)
    for row, own_id in zip(rows, own_ids, strict=True):
        row.append(own_id)
        for _ in range(min(int(rng.integers(3)), len(ids))):
            row.append(ids.pop())
    if num_requests > 1 and rng.random() < 0.2:  # the same request twice
        twin, other = rng.choice(num_requests, 2, replace=False)
        rows[twin] = list(rows[other])
    return rows


def _random_lengths(
    rng: np.random.Generator, rows: list[list[int]], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """seq_lens and query_lens, both int64 [requests]: mostly decodes, some longer, some empty."""
    capacities = np.array([len(row) for row in rows], np.int64) * block_size
    last_blocks = rng.integers(1, block_size + 1, len(rows))
    seq_lens = capacities - block_size + last_blocks
    query_lens = np.ones_like(seq_lens)
    for request, kind in enumerate(rng.random(len(rows))):
        seq_len = int(seq_lens[request])
        if kind < 0.1:  # few tokens at once, as speculation has them
            query_lens[request] = min(seq_len, int(rng.integers(2, 9)))
        elif kind < 0.2:  # a chunk of a prompt
            query_lens[request] = rng.integers(1, min(seq_len, 48) + 1)
        elif kind < 0.25:  # a whole prompt, reading its own blocks only
            seq_lens[request] = query_lens[request] = rng.integers(1, min(seq_len, 64) + 1)
        elif kind < 0.3:  # a padded place in the batch
            query_lens[request] = 0
            seq_lens[request] = rng.choice([0, seq_len])
        elif kind < 0.35:  # ends exactly with a block
            seq_lens[request] = capacities[request]
    return seq_lens, query_lens


def _random_features(rng: np.random.Generator, num_heads: int, max_tokens: int) -> dict[str, Any]:
    features: dict[str, Any] = {}
    wanted = rng.random(4) < 0.25
    if wanted[0]:
        windows = [1, 2, 15, 33, 64, int(rng.integers(1, max_tokens)), 2 * max_tokens]
        features["sliding_window"] = int(rng.choice(windows))
    if wanted[1]:
        slopes = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
        features["alibi_slopes"] = torch.from_numpy(slopes.astype(np.float32))
    if wanted[2]:
        features["logits_soft_cap"] = float(rng.choice([1.0, 20.0, 50.0]))
    if wanted[3]:
        sinks = rng.standard_normal(num_heads, np.float32) * float(rng.choice([1.0, 20.0]))
        features["sinks"] = torch.from_numpy(sinks)
    return features


def _random_hidden(
    rng: np.random.Generator, rows: list[list[int]], num_tokens_before: np.ndarray, block_size: int
) -> HiddenTokens:
    """Mostly what the block says; some requests hide all of it, some nothing."""
    hidden_of_block: dict[int, np.ndarray] = {}
    ranges = {}
    for request, row in enumerate(rows):
        is_hidden = np.zeros((len(row), block_size), bool)
        for place, block in enumerate(row):
            if block not in hidden_of_block:
                kind, cut = rng.random(), int(rng.integers(block_size))
                is_hidden_there = np.zeros(block_size, bool)
                if kind < 0.3:  # padding
                    is_hidden_there[cut:] = True
                elif kind < 0.4:
                    is_hidden_there[:cut] = True
                elif kind < 0.5:
                    is_hidden_there[:] = rng.random(block_size) < 0.3
                hidden_of_block[block] = is_hidden_there
            is_hidden[place] = hidden_of_block[block]
            if (kind := rng.random()) < 0.1:
                is_hidden[place] = kind < 0.05
        flat = np.append(is_hidden.ravel()[: num_tokens_before[request]], False).astype(np.int8)
        edges = np.flatnonzero(np.diff(flat, prepend=0)).reshape(-1, 2).tolist()
        if edges:
            ranges[request] = tuple((begin, end) for begin, end in edges)
    return HiddenTokens(ranges)


def _visible_slots(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    block_size: int,
    window: int | None,
    hidden: HiddenTokens,
) -> tuple[np.ndarray, np.ndarray]:
    """The slots that some query token sees, and the position of each in its sequences."""
    slots, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for request, row in enumerate(block_table):
        seq_len, query_len = int(seq_lens[request]), int(query_lens[request])
        if query_len:
            first = max(0, seq_len - query_len - window + 1) if window else 0
            pieces = hidden.visible_pieces(request, first, seq_len)
            seen = np.concatenate([np.arange(*piece) for piece in pieces])
            slots.append(row[seen // block_size].astype(np.int64) * block_size + seen % block_size)
            positions.append(seen)
    unique_slots, index = np.unique(np.concatenate(slots), return_index=True)
    return unique_slots, np.concatenate(positions)[index]


def _random_data(
    rng: np.random.Generator,
    data: str,
    positions: np.ndarray,
    kv_shape: tuple[int, int, int],
    query_shape: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 key, value and query; small enough for float16."""
    key = rng.standard_normal(kv_shape, np.float32)
    value = rng.standard_normal(kv_shape, np.float32)
    query = rng.standard_normal(query_shape, np.float32)
    if data == "peaky":
        key *= 4
    elif data == "very peaky":
        key *= 20
    elif data == "growing":
        # scores grow to hundreds along the sequence: exp overflows against an early maximum
        direction = np.sign(rng.standard_normal(kv_shape[2])).astype(np.float32)
        growth = (positions / max(1, positions.max(initial=1))).astype(np.float32)
        key = 0.1 * key + 20 * growth[:, None, None] * direction
        query = 0.1 * query + rng.choice([-1, 1]) * direction
    elif data == "constant":
        key[:] = key[:1]
    elif data == "zeros":
        (key, value, query)[rng.integers(3)][:] = 0
    elif data == "large values":
        value *= 1000
    return torch.from_numpy(key), torch.from_numpy(value), torch.from_numpy(query)
