# SPDX-License-Identifier: Apache-2.0
"""Which share of the prefix-cache hits that are possible each eviction policy gets.

vLLM's own block pool serves requests one after the other, all of which wait from the beginning.
Belady's choice, which knows them all, is the best possible. At last, what it costs to have one
prompt wait, run and end: its keys, what waits, and the queue of free blocks.
"""

import json
import os
import statistics
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.config import EvictionPolicyName
from vllm_relay.prefix_cache.eviction.belady import NEVER, belady_hits
from vllm_relay.prefix_cache.eviction.free_queue import make_free_queue
from vllm_relay.prefix_cache.eviction.next_use import NextUse

Chain = list[bytes]

BLOCK_SIZE_TOKENS = 16
POLICIES: tuple[EvictionPolicyName, ...] = ("queue", "lru")
CACHE_FRACTIONS = (0.05, 0.1, 0.25, 0.5)
SHORT_QUEUE_REQUESTS = 64
PROMPT_BLOCKS = 8192


def build_pool(
    policy: EvictionPolicyName, next_use: NextUse, capacity_blocks: int
) -> block_pool.BlockPool:
    """vLLM's block pool with our queue, and room for the null block."""
    queue = make_free_queue(policy, next_use)
    with mock.patch.object(block_pool, "FreeKVCacheBlockQueue", queue):
        return block_pool.BlockPool(
            capacity_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE_TOKENS
        )


def admit(pool: block_pool.BlockPool, hashes: Chain, keys: Chain) -> tuple[list[KVCacheBlock], int]:
    """Gives a request its blocks, caches them all, and counts those that were cached."""
    cached = []
    for key in keys:
        block = pool.cached_block_hash_to_block.get_one_block(key)
        if block is None:
            break
        cached.append(block)
    pool.touch(cached)
    blocks = cached + pool.get_new_blocks(len(keys) - len(cached))
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, len(cached), len(keys), BLOCK_SIZE_TOKENS, 0)
    return blocks, len(cached)


def run_in_order(
    policy: EvictionPolicyName,
    chains: Sequence[Chain],
    capacity_blocks: int,
    waiting_requests: int | None = None,
) -> int:
    """Hit blocks of requests that run one after the other.

    Args:
        waiting_requests: how many of the next requests are known; None for all.
    """
    next_use = NextUse()
    pool = build_pool(policy, next_use, capacity_blocks)
    chains_of_keys = ([make_block_hash_with_group_id(h, 0) for h in chain] for chain in chains)
    arrivals = enumerate(zip(chains, chains_of_keys, strict=True))
    waiting: deque[tuple[int, Chain, Chain]] = deque()

    def arrive(number: int | None) -> None:
        for position, (hashes, keys) in islice(arrivals, number):
            next_use.add((position,), [keys])
            waiting.append((position, hashes, keys))

    hits = 0
    arrive(None if waiting_requests is None else waiting_requests + 1)
    while waiting:
        position, hashes, keys = waiting.popleft()
        next_use.remove((position,), runs=True)
        blocks, num_cached = admit(pool, hashes, keys)
        hits += num_cached
        pool.free_blocks(reversed(blocks))
        arrive(1)
    return hits


def random_workload(seed: int, requests: int) -> list[Chain]:
    """Requests that share prefixes of a random tree: popular and rare ones, deep and flat trees,
    repeated prompts, at random or in bursts."""
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(2, 6))
    fan_out = int(rng.integers(2, 9))
    skew = rng.uniform(0.2, 2)
    popularity = 1 / np.arange(1, fan_out + 1) ** skew
    popularity /= popularity.sum()
    segment_blocks = [int(rng.integers(1, 9)) for _ in range(depth)]
    repeats = rng.choice([0, 0.1, 0.4])
    burst = int(rng.choice([1, 4, 16]))
    chains: list[Chain] = []
    path: list[int] = []
    for request in range(requests):
        if chains and rng.random() < repeats:
            chains.append(chains[int(rng.integers(len(chains)))])
            continue
        if request % burst == 0:
            path = rng.choice(fan_out, depth, p=popularity).tolist()
        name = f"{seed}"
        chain = []
        for branch, blocks in zip(path, segment_blocks, strict=True):
            name += f"/{branch}"
            chain += [f"{name}.{index}".encode() for index in range(blocks)]
        own = f"{name}#{request}"
        chain += [f"{own}.{index}".encode() for index in range(int(rng.integers(0, 9)))]
        chains.append(chain)
    return chains


def traces(folder: Path, requests: int | None) -> Iterator[tuple[str, list[Chain]]]:
    """Mooncake's traces: the hash ids of the blocks of each request, in order of arrival."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open() as lines:
            rows = [json.loads(line)["hash_ids"] for line in islice(lines, requests)]
        yield path.stem, [[block.to_bytes(8, "big") for block in row] for row in rows]


def cache_sizes(chains: Sequence[Chain]) -> list[int]:
    """Fractions of what an unlimited cache would hold, but no less than the longest request."""
    distinct = len({key for chain in chains for key in chain})
    longest = max(map(len, chains))
    return [max(longest, int(distinct * fraction)) for fraction in CACHE_FRACTIONS]


def measure(name: str, chains: Sequence[Chain], capacity_blocks: int) -> Row:
    best = belady_hits(chains, capacity_blocks)
    hits = {policy: run_in_order(policy, chains, capacity_blocks) for policy in POLICIES}
    hits["queue of few"] = run_in_order("queue", chains, capacity_blocks, SHORT_QUEUE_REQUESTS)
    hits["queue of none"] = run_in_order("queue", chains, capacity_blocks, 0)
    row: Row = {
        "workload": name,
        "cache blocks": capacity_blocks,
        "queried": sum(map(len, chains)),
        "unlimited": belady_hits(chains, NEVER),
        "belady": best,
    }
    row |= {policy: number / best if best else None for policy, number in hits.items()}
    for policy in ("queue", "queue of none"):
        row[f"{policy}/lru"] = hits[policy] / hits["lru"] if hits["lru"] else None
    return row


def add_rows(result: Result, what: str, rows: list[Row]) -> None:
    note = (
        "Hit blocks; those of the policies as a fraction of Belady's. queue of few: only the next "
        f"{SHORT_QUEUE_REQUESTS} requests are known, of none: only those that ran. "
        "/lru: - where lru has no hits."
    )
    result.add_table(what, rows, note)
    of_belady = [row["queue"] for row in rows if row["queue"] is not None]
    over_lru = [row["queue/lru"] for row in rows if row["queue/lru"] is not None]
    result.add_goal(Goal(f"{what}: least of queue/Belady", min(of_belady), 0.97, 0.99))
    result.add_goal(
        Goal(f"{what}: median of queue/Belady", statistics.median(of_belady), 0.97, 0.99)
    )
    if over_lru:
        result.add_goal(Goal(f"{what}: least of queue/lru", min(over_lru), 1.0))
        result.add_goal(Goal(f"{what}: median of queue/lru", statistics.median(over_lru), 1.0))
        unknown = [row["queue of none/lru"] for row in rows if row["queue of none/lru"] is not None]
        result.add_goal(Goal(f"{what}: least of queue of none/lru", min(unknown), 1.0))


def cost(policy: EvictionPolicyName, prompt_blocks: int, rounds: int) -> Row:
    """Least times, where the cache is full and every prompt evicts another one."""
    next_use = NextUse()
    queue = make_free_queue(policy, next_use)(
        [KVCacheBlock(block_id) for block_id in range(2 * prompt_blocks)]
    )
    least_ms: dict[str, float] = {}
    for request in range(2 + rounds):
        hashes = [os.urandom(32) for _ in range(prompt_blocks)]
        times_s = [time.perf_counter()]
        keys = [make_block_hash_with_group_id(each, 0) for each in hashes]
        next_use.add((request,), [keys])
        times_s.append(time.perf_counter())
        next_use.remove((request,), runs=True)
        blocks = queue.popleft_n(prompt_blocks)
        times_s.append(time.perf_counter())
        for index, (block, key) in enumerate(zip(blocks, keys, strict=True), 1):
            block.reset_hash()
            block.set_block_hash(key, BLOCK_SIZE_TOKENS * index)
        blocks.reverse()
        began_s = time.perf_counter()
        queue.append_n(blocks)
        freeing_s = time.perf_counter() - began_s
        if request >= 2:
            waiting_s, running_s = (end - begin for begin, end in pairwise(times_s))
            for what, seconds in (("wait", waiting_s), ("run", running_s), ("free", freeing_s)):
                least_ms[what] = min(1e3 * seconds, least_ms.get(what, inf))
    least_ms["all"] = sum(least_ms.values())
    return {"eviction": policy, **{f"{what} ms": ms for what, ms in least_ms.items()}}


def add_costs(result: Result, prompt_blocks: int, rounds: int) -> None:
    rows = [cost(policy, prompt_blocks, rounds) for policy in POLICIES]
    result.add_table(f"A prompt of {prompt_blocks:,} blocks that evicts another", rows)
    what = f"a prompt of {prompt_blocks:,} blocks waits, runs and ends, ms"
    worst = next(row["all ms"] for row in rows if row["eviction"] == "queue")
    result.add_goal(Goal(what, worst, 6.0, 4.0, lower_is_better=True, unit="ms"))


def parse_options() -> Namespace:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--workloads", type=int, default=20, help="random ones (%(default)s)")
    parser.add_argument("--requests", type=int, default=2000, help="of each (%(default)s)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="Mooncake's: *.jsonl with hash_ids"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    result = Result.begin(__file__, __doc__, options)
    workloads, requests = (2, 60) if options.smoke else (options.workloads, options.requests)
    rows = []
    for seed in range(workloads):
        chains = random_workload(seed, requests)
        rows += [measure(f"random {seed}", chains, size) for size in cache_sizes(chains)]
    add_rows(result, "random workloads", rows)
    if options.data:
        for name, chains in traces(options.data, 60 if options.smoke else None):
            add_rows(result, name, [measure(name, chains, size) for size in cache_sizes(chains)])
    add_costs(result, 64 if options.smoke else PROMPT_BLOCKS, 2 if options.smoke else 20)
    result.end(options)


if __name__ == "__main__":
    main()
