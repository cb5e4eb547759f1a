# SPDX-License-Identifier: Apache-2.0
"""What it costs to know which of many replicas holds which KV blocks.

Every replica holds as many blocks, nearly all of them its own: prompts of 2,048 tokens whose first
quarter is one of eight that all have, blocks of 16 tokens. Decisions are `Router`'s, for a prompt
that one replica knows but for its last quarter, and gets; all loads differ. Events are vLLM's own,
as they come over ZeroMQ: of steps that store 4 prompts without their first quarter and remove as
many blocks, one event for each; and of steps in which 64 requests store a block of their answers.
The time of decoding them is in it.
"""

import gc
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from typing import Any

import msgspec
import psutil
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.cluster.kv_events import EventTeller
from vllm_relay.cluster.replica_index import PredictedCaches, chain_of
from vllm_relay.cluster.routing import Router, ServingCosts
from vllm_relay.cluster.told_caches import ToldCaches

VOCABULARY = range(150_000)
BLOCK_TOKENS = 16
PROMPT_BLOCKS, SHARED_BLOCKS = 128, 32
SYSTEM_PROMPTS = 8
DECODING = 64
COSTS = ServingCosts(4e-5, 1e-3)


class Workload:
    """Prompts of which each replica has those that fill its cache."""

    def __init__(self, replicas: int, blocks: int) -> None:
        self.rng = random.Random(0)
        self.replicas = replicas
        self.prompts_each = blocks // replicas // (PROMPT_BLOCKS - SHARED_BLOCKS)
        # room for what is sent in the measurement, too
        self.num_blocks = blocks // replicas + SYSTEM_PROMPTS * SHARED_BLOCKS + 4 * PROMPT_BLOCKS
        self.shared = [self.tokens(SHARED_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
        self.seeds = [self.rng.getrandbits(60) for _ in range(replicas * self.prompts_each)]

    def tokens(self, num_blocks: int, seed: int | None = None) -> list[int]:
        rng = self.rng if seed is None else random.Random(seed)
        return rng.choices(VOCABULARY, k=num_blocks * BLOCK_TOKENS)

    def own_tokens(self, number: int) -> list[int]:
        """Of a prompt what comes after its first quarter."""
        return self.tokens(PROMPT_BLOCKS - SHARED_BLOCKS, self.seeds[number])

    def chain(self, number: int) -> list[int]:
        tokens = self.shared[number % SYSTEM_PROMPTS] + self.own_tokens(number)
        return chain_of(tokens, BLOCK_TOKENS)

    def home(self, number: int) -> int:
        return number // self.prompts_each


def names(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def stored(names: list[int], after: int | None, tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=names,
        parent_block_hash=after,
        token_ids=tokens,
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(names),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def tell_all(caches: ToldCaches, workload: Workload) -> list[dict[int, int]]:
    """Fill told caches; returns the names of the last shared blocks on each replica."""
    rng = random.Random(1)
    ends: list[dict[int, int]] = []
    for replica in range(workload.replicas):
        ends.append({})
        for which, tokens in enumerate(workload.shared):
            own = names(rng, SHARED_BLOCKS)
            ends[-1][which] = own[-1]
            caches.stored(replica, own, None, tokens)
    for number in range(len(workload.seeds)):
        replica = workload.home(number)
        after = ends[replica][number % SYSTEM_PROMPTS]
        own = names(rng, PROMPT_BLOCKS - SHARED_BLOCKS)
        caches.stored(replica, own, after, workload.own_tokens(number))
    return ends


def send_all(caches: PredictedCaches, workload: Workload) -> None:
    for number in range(len(workload.seeds)):
        caches.sent(workload.home(number), workload.chain(number))


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def decisions_us(caches: PredictedCaches, workload: Workload, count: int) -> list[float]:
    router = Router(caches, COSTS, BLOCK_TOKENS, workload.replicas)
    # nobody's load is like another's
    for replica in range(workload.replicas):
        router.route(f"load {replica}", [], 1 + 7 * replica, replica // 4, among=[replica])
    found = []
    for number in range(count):
        which = workload.rng.randrange(len(workload.seeds))
        known = workload.chain(which)
        own = workload.tokens(PROMPT_BLOCKS // 4)
        kept = known[: -PROMPT_BLOCKS // 4]
        chain = kept + chain_of(own, BLOCK_TOKENS, kept[-1])
        began_s = time.perf_counter()
        routed = router.route(number, chain, PROMPT_BLOCKS * BLOCK_TOKENS + 5, 100)
        found.append(1e6 * (time.perf_counter() - began_s))
        assert routed.replica == workload.home(which)
        router.ended(number)
    return found


def prefill_steps(
    workload: Workload, ends: dict[int, int], count: int
) -> Iterator[tuple[int, list[Any]]]:
    """Blocks that a step stores and removes, and its events."""
    rng = random.Random(2)
    held: list[list[int]] = []
    for _ in range(count):
        events: list[Any] = []
        removed, held = held, []
        events += [BlockRemoved([name], "GPU", 0) for each in removed for name in each]
        for _ in range(4):
            held.append(names(rng, PROMPT_BLOCKS - SHARED_BLOCKS))
            tokens = workload.tokens(len(held[-1]))
            events.append(stored(held[-1], ends[rng.randrange(SYSTEM_PROMPTS)], tokens))
        yield sum(map(len, removed)) + sum(map(len, held)), events


def decoding_steps(
    workload: Workload, ends: dict[int, int], count: int
) -> Iterator[tuple[int, list[Any]]]:
    rng = random.Random(3)
    for _ in range(count):
        own = names(rng, DECODING)
        after = [ends[rng.randrange(SYSTEM_PROMPTS)] for _ in own]
        yield (
            DECODING,
            [stored([a], b, workload.tokens(1)) for a, b in zip(own, after, strict=True)],
        )
        yield DECODING, [BlockRemoved([name], "GPU", 0) for name in own]


def blocks_per_s(caches: ToldCaches, steps: Iterable[tuple[int, list[Any]]]) -> float:
    """Stored and removed, of the last replica."""
    encoded = [(count, msgspec.msgpack.encode(KVEventBatch(0.0, each))) for count, each in steps]
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    teller = EventTeller(caches, caches.held.num_replicas - 1)
    began_s = time.perf_counter()
    for _, message in encoded:
        teller.tell(decoder.decode(message).events)
    return sum(count for count, _ in encoded) / (time.perf_counter() - began_s)


def measure(name: str, options: Namespace) -> tuple[Row, list[Row]]:
    """What an index costs, and the events of one that is told."""
    workload = Workload(options.replicas, options.blocks)
    before_bytes = resident_bytes()
    num_blocks = [workload.num_blocks] * options.replicas
    caches: PredictedCaches
    if name == "told":
        told = caches = ToldCaches(num_blocks, BLOCK_TOKENS)
        ends = tell_all(told, workload)[-1]
    else:
        caches = PredictedCaches(num_blocks)
        send_all(caches, workload)
    num_bytes = resident_bytes() - before_bytes
    known = len(caches.held)
    gc.freeze()
    taken_us = sorted(decisions_us(caches, workload, options.decisions))
    row: Row = {
        "caches": name,
        "replicas": options.replicas,
        "different blocks": known,
        "MB per million": num_bytes / known,
        "decision p50 us": statistics.median(taken_us),
        "decision p99 us": taken_us[int(0.99 * len(taken_us))],
    }
    events: list[Row] = []
    if name == "told":
        for what, steps in (("prompts", prefill_steps), ("answers", decoding_steps)):
            rates = [
                blocks_per_s(told, steps(workload, ends, options.steps))
                for _ in range(options.rounds)
            ]
            events.append({"blocks of": what, "blocks per s": statistics.median(rates)})
    return row, events


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--replicas", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of all (%(default)s)")
    parser.add_argument("--decisions", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="with events (%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.replicas, options.blocks, options.decisions, options.steps = 4, 4000, 20, 3
    result = Result.begin(__file__, __doc__, options)
    # each in a process of its own, whose memory is that of its index
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = [pool.apply(measure, (name, options)) for name in ("predicted", "told")]
    rows, events = [row for row, _ in found], found[-1][1]
    result.add_table("An index of the KV blocks of many replicas", rows)
    result.add_table("KV events that are decoded and applied, on one core", events)
    for row in rows:
        name = row["caches"]
        p50, size = row["decision p50 us"], row["MB per million"]
        result.add_goal(Goal(f"{name}: a decision", p50, 100, 25, True, "us"))
        result.add_goal(Goal(f"{name}: memory for a million blocks", size, 200, 100, True, "MB"))
    for row in events:
        rate = row["blocks per s"]
        result.add_goal(Goal(f"events of {row['blocks of']}", rate, 1e5, 5e5, unit="blocks/s"))
    result.end(options)


if __name__ == "__main__":
    main()
