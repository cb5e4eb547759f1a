# SPDX-License-Identifier: Apache-2.0
"""Requests for many replicas: the paper's, skewed ones, chats that go on, and a server's trace."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.scheduler.bench_traces import SCALE, read_traces
from vllm_relay.prefix_cache.predict.input import PredictedRequest

_VOCABULARY = 30_000


@dataclass(frozen=True)
class Workload:
    """
    Attributes:
        name: for tables.
        requests: in the order in which they come.
        cache_blocks: of 16 tokens, of each replica.
        scale: how many tokens and steps of a server one of these stands for.
    """

    name: str
    requests: list[PredictedRequest]
    cache_blocks: int
    scale: int = 1

    @property
    def longest_tokens(self) -> int:
        return max(len(each.prompt_token_ids) + each.output_tokens for each in self.requests)


def repetition(
    replicas: int, per_replica: int, seed: int, output_tokens: int, num_prefixes: int | None = None
) -> Workload:
    """The experiment of Wang, 2025: prompts of 512 tokens, half of them one of four prefixes for
    each replica, in random order; a cache as a GPU with 24 GB has beside an 8B model."""
    rng = np.random.default_rng(seed)
    num_prefixes = num_prefixes or 4 * replicas
    prefixes = rng.integers(3, _VOCABULARY, (num_prefixes, 256)).tolist()
    count = replicas * per_replica
    chosen = rng.permutation(np.arange(count) % len(prefixes))
    return Workload("repetition", _under(prefixes, chosen, 256, output_tokens, rng), 1750)


def skewed(replicas: int, per_replica: int, seed: int, output_tokens: int) -> Workload:
    """16 prefixes for each replica, their popularity by Zipf's law with exponent 0.9; a cache has
    room for about as many."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(3, _VOCABULARY, (16 * replicas, 768)).tolist()
    weights = 1 / np.arange(1, len(prefixes) + 1) ** 0.9
    count = replicas * per_replica
    chosen = rng.choice(len(prefixes), count, p=weights / weights.sum())
    return Workload("skewed", _under(prefixes, chosen, 128, output_tokens, rng), 1750)


def chats(replicas: int, per_replica: int, seed: int, output_tokens: int) -> Workload:
    """Chats of four turns under one of eight system prompts; each turn brings 96 tokens and repeats
    all before it, and other chats' turns come between."""
    rng = np.random.default_rng(seed)
    systems = rng.integers(3, _VOCABULARY, (8, 512)).tolist()
    turns, count = 4, replicas * per_replica
    num_chats = count // turns
    texts = [list(systems[int(rng.integers(8))]) for _ in range(num_chats)]
    # a turn comes after a while in which others' come
    places = (
        rng.random((num_chats, 1)) * (turns - 1) + np.arange(turns) + rng.random((num_chats, turns))
    )
    order = np.argsort(places.reshape(-1), kind="stable")
    requests = []
    for number, place in enumerate(order.tolist()):
        text = texts[place // turns]
        text += rng.integers(3, _VOCABULARY, 96).tolist()
        requests.append(PredictedRequest(number, list(text), output_tokens))
    return Workload("chats", requests, 1750)


def answers_differ(replicas: int, per_replica: int, seed: int, output_tokens: int) -> Workload:
    """Groups of 16 prompts that nobody has seen before, and answers of very different lengths."""
    rng = np.random.default_rng(seed)
    count = replicas * per_replica
    prefixes = rng.integers(3, _VOCABULARY, (max(count // 16, 1), 512)).tolist()
    chosen = rng.permutation(np.arange(count) % len(prefixes))
    lengths = rng.lognormal(np.log(output_tokens) - 0.5, 1.0, count).clip(1, 400).astype(int)
    requests = [
        replace(request, output_tokens=length)
        for request, length in zip(
            _under(prefixes, chosen, 64, 0, rng), lengths.tolist(), strict=True
        )
    ]
    return Workload("answers differ", requests, 1750)


def trace(options: Namespace, replicas: int, per_replica: int, *_: int) -> Workload:
    """The first requests of a trace, see `bench_traces`, in its order; a cache has room for about
    as much as 50 GB hold for an 8B model."""
    rows = read_traces(options)
    requests = rows[min(rows)].requests[: replicas * per_replica]
    return Workload("trace", requests, 800, SCALE)


def _under(prefixes, chosen, own_tokens, output_tokens, rng) -> list[PredictedRequest]:
    return [
        PredictedRequest(
            number,
            prefixes[prefix] + rng.integers(3, _VOCABULARY, own_tokens).tolist(),
            output_tokens,
        )
        for number, prefix in enumerate(chosen.tolist())
    ]


Maker = Callable[[int, int, int, int], Workload]


def workloads(options: Namespace) -> dict[str, Maker]:
    """Of replicas, requests for each, a seed, and tokens of answers where these are alike."""
    return {
        "repetition": repetition,
        "skewed": skewed,
        "chats": chats,
        "answers differ": answers_differ,
        "trace": partial(trace, options),
    }
