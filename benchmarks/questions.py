# SPDX-License-Identifier: Apache-2.0
"""What readers of the benchmarks want to know, and which of them answer it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """In words, with the benchmarks that answer it; `plots` show it at a glance."""

    text: str
    benchmarks: tuple[str, ...]
    plots: tuple[str, ...] = ()


QUESTIONS = (
    Question(
        "How many requests must share how much before attention gains?",
        ("bench_op", "bench_avx2", "bench_rollouts", "bench_shared_phase", "bench_threads"),
        ("pays_attention.svg",),
    ),
    Question("What is left of it end to end?", ("bench_end_to_end",)),
    Question("Is it ever slower than stock attention?", ("bench_random_batches",)),
    Question("What does finding out who shares cost?", ("bench_planning", "bench_planning_gpu")),
    Question("How far are results from exact ones?", ("bench_error", "bench_low_parts")),
    Question(
        "What does the scheduler gain, and at which load?",
        ("bench_scheduler", "bench_online", "bench_serve", "bench_backlog", "bench_traces"),
        ("pays_scheduler.svg",),
    ),
    Question("What does scheduling cost while many wait?", ("bench_scheduling",)),
    Question("Which blocks should leave the cache?", ("bench_eviction",)),
    Question("Can hits be known beforehand?", ("bench_predictor",)),
    Question("What do prompt modules gain?", ("bench_modules",)),
    Question(
        "In which order should a table be asked?",
        ("bench_tables", "bench_table_queries", "bench_table_queries_learned"),
        ("table_orders.svg", "table_queries.svg"),
    ),
    Question("Beside other systems for tables?", ("bench_table_rivals",)),
    Question("What do semantic operators save?", ("bench_semantic_operators",)),
    Question(
        "Which of many replicas should a request go to?",
        ("bench_replicas", "bench_replica_seeds", "bench_bucketing", "bench_real_replicas"),
    ),
    Question("What does it cost to know, and to send?", ("bench_replica_index", "bench_ray_data")),
    Question(
        "How much faster is sparse attention over a long context?",
        ("bench_long_context_decode", "bench_sparse_layer", "bench_step_parts"),
        ("pays_sparse.svg",),
    ),
    Question(
        "What does sparse attention cost in quality?",
        ("bench_long_context_quality", "bench_long_context_english", "bench_real_heads"),
    ),
    Question("How many long requests fit?", ("bench_long_context_capacity",)),
    Question("What does it cost where it has nothing to do?", ("bench_long_context_short",)),
    Question(
        "Which key index, and how wide?",
        ("bench_key_index", "bench_model_heads", "bench_planner"),
    ),
    Question(
        "What do building, storing and opening contexts cost?",
        ("bench_index_build", "bench_storage", "bench_open_context"),
    ),
    Question("How many prefixes can the live page draw?", ("bench_page",)),
    Question("What does the live page cost a step?", ("bench_feed",)),
)
