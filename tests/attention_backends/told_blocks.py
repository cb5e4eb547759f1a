# SPDX-License-Identifier: Apache-2.0
"""What a scheduler tells a worker of its requests' blocks, for batches of the tests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from vllm_relay.attention_backends.worker_blocks import WorkerBlocks


def tell(
    blocks: WorkerBlocks, block_table: np.ndarray, seq_lens: np.ndarray, block_size: int
) -> None:
    """A step in which all requests of a batch are new, in one KV cache group of one layer,
    "layer"; those before have ended."""
    spec = SimpleNamespace(block_size=block_size)
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
    names = [f"{blocks.num_changes}-{number}" for number in range(len(seq_lens))]
    held = -(-seq_lens // block_size)
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        input_batch=SimpleNamespace(req_ids=names),
    )
    output = SimpleNamespace(
        finished_req_ids=list(blocks._rows),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=[row[:count].tolist()])
            for name, row, count in zip(names, block_table, held, strict=True)
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    )
    blocks.begin_step(SimpleNamespace(model_runner=runner), output)
