# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM prompts and what its KV events say of its cache before each, for test_told_vllm.py.

Usage: python -m tests.cluster.told_vllm_main MODEL FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from vllm import SamplingParams
from vllm.inputs import tokens_input

from tests.support.small_llm import small_relay_llm
from tests.support.waiting import wait_for
from vllm_relay.cluster.event_stream import EventEndpoints
from vllm_relay.cluster.kv_events import KvEventListener
from vllm_relay.cluster.replica_index import Block, chain_of
from vllm_relay.cluster.told_caches import ToldCaches

SIZE = 32
NUM_BLOCKS = 25
PREFIXES, PREFIX_BLOCKS = 5, 6
REQUESTS = 60


def wait_until_held(caches: ToldCaches, chain: list[Block]) -> None:
    wait_for(lambda: caches.held.ends(chain) == [(len(chain), 1)])


def main(model: str, folder: Path) -> None:
    events = f"ipc://{folder}/events"
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": f"{events}-again",
    }
    caches = ToldCaches([NUM_BLOCKS - 1], SIZE)
    endpoints = EventEndpoints.of(f"{events},{events}-again")
    listener = KvEventListener(caches, [endpoints], [0])
    llm = small_relay_llm(
        model,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=320,
        kv_events_config=config,
        skip_tokenizer_init=True,
    )
    rng = random.Random(0)
    prefixes = [rng.choices(range(3, 200), k=PREFIX_BLOCKS * SIZE) for _ in range(PREFIXES)]
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    rows = []
    for _ in range(REQUESTS):
        prefix = prefixes[min(int(rng.expovariate(0.8)), PREFIXES - 1)]
        # a last block of its own: when it is told, so is all before
        prompt = prefix[: SIZE * rng.randint(1, PREFIX_BLOCKS)] + rng.choices(range(3, 200), k=40)
        chain = chain_of(prompt, SIZE)
        [(expected, _)] = caches.held.ends(chain)
        [output] = llm.generate([tokens_input(prompt)], sampling, use_tqdm=False)
        rows.append((expected * SIZE, output.num_cached_tokens))
        wait_until_held(caches, chain)
    held = len(caches.held)
    assert llm.reset_prefix_cache()
    # the next step tells of it
    llm.generate([tokens_input([9] * 40)], sampling, use_tqdm=False)
    wait_until_held(caches, chain_of([9] * 32, SIZE))
    found = {"rows": rows, "held": held, "held_after_reset": len(caches.held)}
    (folder / "found.json").write_text(json.dumps(found))
    listener.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
