# SPDX-License-Identifier: Apache-2.0
"""The prompts of a step as the batch that a stock backend gets."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import CommonAttentionMetadata


def requests_behind(
    common: CommonAttentionMetadata, num_decodes: int, num_decode_tokens: int
) -> CommonAttentionMetadata:
    """The requests behind the first `num_decodes` as a batch of their own."""
    rows = slice(num_decodes, None)

    def sliced(name: str, part: slice) -> dict[str, Any]:
        value = getattr(common, name, None)
        return {} if value is None else {name: value[part]}

    return common.replace(
        query_start_loc=common.query_start_loc[rows] - num_decode_tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows] - num_decode_tokens,
        seq_lens=common.seq_lens[rows],
        num_reqs=common.num_reqs - num_decodes,
        num_actual_tokens=common.num_actual_tokens - num_decode_tokens,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[num_decode_tokens:],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **sliced("seq_lens_cpu_upper_bound", rows),
        **sliced("is_prefilling", rows),
        **sliced("req_idx", rows),
        **sliced("positions", slice(num_decode_tokens, None)),
    )
