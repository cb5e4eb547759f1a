# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows become prompts: questions to language models as part of a query. See
docs/tables.md.

Liu et al., "Optimizing LLM Queries in Relational Workloads", 2024.

    question.py          what is asked of a row                                        (pure)
    outputs.py           what answers are, and how their texts are read                (pure)
    images.py            fields that are images                                        (pure)
    structs/             JSON answers as columns of structs and lists
    dataframes.py, map_result.py, caller_tables.py   llm_map                           (DuckDB)
    map_files.py         llm_map of more rows than fit into memory
    texts.py, tracing.py   names in SQL, long texts in messages; OpenTelemetry
    ordering/            the order of rows and fields with which the prefix cache finds most
    hosts/               tables that Ray Data, Spark and Daft hold
    jobs/                a question asked of every distinct row of a table
    engines/             what answers: vLLM in this process, or a server
    semantic/            questions about groups, pairs and whole tables
    sql/                 llm() in DuckDB's SQL
    shell/               vllm-relay sql
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_relay.tables.dataframes import llm_map, llm_map_async
    from vllm_relay.tables.engines.opening import open_engine
    from vllm_relay.tables.jobs.asking import ask
    from vllm_relay.tables.jobs.options import JobOptions, TokenBudgetError
    from vllm_relay.tables.jobs.prompts.format import PromptTemplate
    from vllm_relay.tables.jobs.prompts.planner import plan_prompts
    from vllm_relay.tables.map_files import llm_map_file
    from vllm_relay.tables.map_result import MapBudgetError, MapResult, RowsFailedError
    from vllm_relay.tables.outputs import Output
    from vllm_relay.tables.question import Question, RequestOptions
    from vllm_relay.tables.semantic.aggregate import AggregateResult, llm_agg
    from vllm_relay.tables.semantic.embeddings import ServerEmbeddings
    from vllm_relay.tables.semantic.filter import FilterResult, llm_filter
    from vllm_relay.tables.semantic.join import JoinResult, llm_join
    from vllm_relay.tables.semantic.near_duplicates import NearDuplicates
    from vllm_relay.tables.semantic.top_k import TopKResult, llm_top_k
    from vllm_relay.tables.sql.connection import connect

__all__ = [
    "AggregateResult",
    "FilterResult",
    "JobOptions",
    "JoinResult",
    "MapBudgetError",
    "MapResult",
    "NearDuplicates",
    "Output",
    "PromptTemplate",
    "Question",
    "RequestOptions",
    "RowsFailedError",
    "ServerEmbeddings",
    "TokenBudgetError",
    "TopKResult",
    "ask",
    "connect",
    "llm_agg",
    "llm_filter",
    "llm_join",
    "llm_map",
    "llm_map_async",
    "llm_map_file",
    "llm_top_k",
    "open_engine",
    "plan_prompts",
]

_MODULES = {
    "AggregateResult": "semantic.aggregate",
    "FilterResult": "semantic.filter",
    "JobOptions": "jobs.options",
    "JoinResult": "semantic.join",
    "MapBudgetError": "map_result",
    "MapResult": "map_result",
    "NearDuplicates": "semantic.near_duplicates",
    "Output": "outputs",
    "PromptTemplate": "jobs.prompts.format",
    "Question": "question",
    "RequestOptions": "question",
    "RowsFailedError": "map_result",
    "ServerEmbeddings": "semantic.embeddings",
    "TokenBudgetError": "jobs.options",
    "TopKResult": "semantic.top_k",
    "ask": "jobs.asking",
    "connect": "sql.connection",
    "llm_agg": "semantic.aggregate",
    "llm_filter": "semantic.filter",
    "llm_join": "semantic.join",
    "llm_map": "dataframes",
    "llm_map_async": "dataframes",
    "llm_map_file": "map_files",
    "llm_top_k": "semantic.top_k",
    "open_engine": "engines.opening",
    "plan_prompts": "jobs.prompts.planner",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: DuckDB and Arrow are optional, and take time."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
