# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows become prompts: the order of rows and fields that the prefix cache likes.

Liu et al., "Optimizing LLM Queries in Relational Workloads", 2024.

    sequences.py         token sequences, what their beginnings share
    columns.py           a field of all rows: integer codes and the tokens of its values
    duplicates.py        rows that become the same prompt; which fields determine which
    table_order.py       orders; one order of fields for all rows
    per_row/             an order of fields for each row
    cached_tokens.py     what the prefix cache finds, prompt after prompt
    order.py             the order with which it finds most
"""

from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.columns import (
    Column,
    encode_column,
    encode_columns,
    render_field,
    render_value,
)
from vllm_relay.tables.ordering.duplicates import DistinctRows, distinct_rows, find_dependencies
from vllm_relay.tables.ordering.order import ChosenOrder, FieldPrompts, choose_order
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.ordering.table_order import TableOrder, compose

__all__ = [
    "BlockCache",
    "ChosenOrder",
    "Column",
    "DistinctRows",
    "FieldPrompts",
    "TableOrder",
    "TokenSequences",
    "cached_tokens",
    "choose_order",
    "compose",
    "distinct_rows",
    "encode_column",
    "encode_columns",
    "find_dependencies",
    "render_field",
    "render_value",
]
