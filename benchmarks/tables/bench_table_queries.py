# SPDX-License-Identifier: Apache-2.0
"""Queries with llm() over tables: time of the whole job.

The five kinds of queries of Liu et al., 2024, with a model of Qwen2.5-0.5B's size and random
weights. "keep" asks stock vLLM with its prefix cache, in the order of the table's rows and fields;
"auto" asks vLLM with relay attention and the relay scheduler in the order that is chosen. Both ask
equal prompts once. Queries with something to push down are compared with prompts for every row of
the table, one after the other, asked of stock vLLM; choices are then written to their end, where
both others stop when one is certain. Times are those of the whole query: planning, SQL, the model.
Before each the prefix cache is emptied. EXPLAIN is what it says before the query runs the first
time.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
from vllm import LLM

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import Timing, ratio
from benchmarks.tables.database import Database
from benchmarks.tables.dummy_model import HALF_BILLION, TINY, save_model
from benchmarks.tables.queries import ANSWER, PUSHED_DOWN, QUERIES, SENTIMENT, Call, TableQuery
from vllm_relay.demo.engine_process import wait_until_workers_sleep
from vllm_relay.tables.engines.base import Prompt
from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.connection import connect

EACH_BAR, MEDIAN_BAR, MEDIAN_AIM = 1.5, 2, 3
PUSHED_BAR, PUSHED_AIM = 4, 6
PUSHDOWN = "pushdown"
"""The name of all queries that are compared with prompts for every row."""
KV_CACHE_BYTES = 1 << 30  # of each of the two engines


class WholeAnswers(InProcessEngine):
    """Answers with choices come as stock vLLM gives them: token by token to their end."""

    def max_answer_tokens(self, question: Question) -> int:
        return question.max_tokens


class Contender:
    """An engine and the order in which it is asked."""

    def __init__(self, llm: LLM, order: Any, database: Database) -> None:
        self.engine = InProcessEngine(llm)
        self._naive = WholeAnswers(llm)
        self._order = order
        self._database = database

    def run(self, query: TableQuery) -> tuple[float, JobReport]:
        """Seconds of the query, and what it took."""
        self.engine.llm.reset_prefix_cache()
        connection = self._connection()
        began_s = time.perf_counter()
        result = connection.sql(query.sql)
        # models of random weights do not end their texts, small ones rarely
        assert result is not None and all("was cut" in each.error for each in result.errors)
        result.fetchall()
        seconds = time.perf_counter() - began_s
        wait_until_workers_sleep()
        return seconds, result.report

    def explain(self, query: TableQuery) -> Any:
        explained = self._connection().explain(query.sql)
        wait_until_workers_sleep()
        return explained

    def run_naive(self, query: TableQuery) -> float:
        """Seconds of prompts for every row."""
        self.engine.llm.reset_prefix_cache()
        connection = self._database.connect()
        began_s = time.perf_counter()
        for call in query.naive:
            prompts = naive_prompts(connection, call, self._naive.tokenizer)
            for completion in self._naive.generate(prompts, call.question):
                assert not completion.error, completion.error
        seconds = time.perf_counter() - began_s
        wait_until_workers_sleep()
        return seconds

    def _connection(self) -> Any:
        return connect(
            self._database.connect(),
            engine=self.engine,
            options=JobOptions(order=self._order, show_progress=False),
        )


def naive_prompts(
    connection: duckdb.DuckDBPyConnection, call: Call, tokenizer: Any
) -> Iterator[Prompt]:
    template = JobOptions().template
    prompts = PromptFormat(call.question, tokenizer, template)
    texts = ", ".join(f"coalesce(to_json({name})::VARCHAR, 'null')" for name in call.fields)
    for number, values in enumerate(connection.execute(f"SELECT {texts} FROM films").fetchall()):
        fields = zip(call.fields, values, strict=True)
        message = prompts.message([template.render_field(*field) for field in fields])
        yield Prompt(number, message, prompts.token_ids([message])[0])


def measure_orders(keep: Contender, auto: Contender, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for query in (each for each in QUERIES if short_name(each) in options.queries):
        explained = auto.explain(query)
        samples: dict[str, list[float]] = {"keep": [], "auto": []}
        reports: dict[str, JobReport] = {}
        for _ in range(options.rounds):
            for name, contender in (("keep", keep), ("auto", auto)):
                seconds, reports[name] = contender.run(query)
                samples[name].append(seconds)
        kept, asked = reports["keep"], reports["auto"]
        auto_s = Timing(samples["auto"])
        estimates = [call.estimate for call in explained.calls]
        predicted_tokens = sum(each.prompt_tokens for each in estimates)
        predicted_cached = sum(each.cached_tokens or 0 for each in estimates)
        rows.append(
            {
                "query": query.name,
                "prompts": asked.num_prompts,
                "tokens a prompt": asked.prompt_tokens / max(asked.num_prompts, 1),
                "keep: hit rate": kept.cached_tokens / kept.prompt_tokens,
                "auto: hit rate": asked.cached_tokens / asked.prompt_tokens,
                "keep s": Timing(samples["keep"]).median_s,
                "auto s": auto_s.median_s,
                "keep over auto": ratio(Timing(samples["keep"]), auto_s),
                "planning": asked.planning_seconds / asked.seconds,
                "EXPLAIN: prompt tokens off": predicted_tokens - asked.prompt_tokens,
                "EXPLAIN: hit rate, points off": 100
                * (predicted_cached - asked.cached_tokens)
                / asked.prompt_tokens,
                "EXPLAIN: seconds": explained.seconds,
                "EXPLAIN: seconds off": explained.seconds / auto_s.median_s - 1,
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_pushdown(
    stock: Contender, auto: Contender, database: Database, options: Namespace
) -> list[Row]:
    rows: list[Row] = []
    for query in PUSHED_DOWN if PUSHDOWN in options.queries else ():
        naive_s, auto_s = [], []
        for _ in range(options.rounds):
            naive_s.append(stock.run_naive(query))
            seconds, report = auto.run(query)
            auto_s.append(seconds)
        rows.append(
            {
                "query": query.name,
                "rows of the table": database.num_films,
                "prompts asked": report.num_prompts,
                "every row s": Timing(naive_s).median_s,
                "auto s": Timing(auto_s).median_s,
                "every row over auto": ratio(Timing(naive_s), Timing(auto_s)),
            }
        )
        print(rows[-1], flush=True)
    return rows


def short_name(query: TableQuery) -> str:
    return query.name.split()[0]


def start(model: str, options: Namespace, **arguments: Any) -> LLM:
    return LLM(
        model,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=options.requests,
        block_size=options.block_size,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=True,
        disable_log_stats=True,
        enforce_eager=True,
        **arguments,
    )


def measure(
    model: str, load_format: str, database: Database, options: Namespace
) -> tuple[list[Row], list[Row]]:
    """Rows of both tables."""
    arguments: dict[str, Any] = {"load_format": load_format}
    stock_llm = start(model, options, **arguments)
    relay = {"attention_backend": "relay", "additional_config": {"relay": {"scheduler": True}}}
    relay_llm = start(model, options, **arguments, **relay)
    keep = Contender(stock_llm, "keep", database)
    auto = Contender(relay_llm, "auto", database)
    return measure_orders(keep, auto, options), measure_pushdown(keep, auto, database, options)


def options_of(description: str, rows: int) -> Namespace:
    parser = argument_parser(description, rounds=2, threads=2)
    parser.add_argument("--data", type=Path, help="folder with the papers' tables")
    parser.add_argument("--rows", type=int, default=rows, help="of a table (%(default)s)")
    names = [*map(short_name, QUERIES), PUSHDOWN]
    parser.add_argument(
        "--queries", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"of {', '.join(names)}; all by default",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", help="of the model (%(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="at once (%(default)s)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens (%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.rounds = 24, 1
    options.tables = "given" if options.data else "made"
    return options


def main() -> None:
    options = options_of(__doc__, rows=200)
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        folder = Path(name)
        database = Database(folder, options.data, options.rows)
        texts = [*database.texts, SENTIMENT.text, ANSWER.text]
        model = save_model(TINY if options.smoke else HALF_BILLION, texts, folder)
        add_measured(result, model, "dummy", database, options)
    result.end(options)


def add_measured(
    result: Result, model: str, load_format: str, database: Database, options: Namespace
) -> None:
    orders, pushed = measure(model, load_format, database, options)
    result.add_table("Whole queries: the table's order against the chosen one", orders)
    result.add_table("Whole queries: every row against what has to be asked", pushed)
    if len(orders) < len(QUERIES) or not pushed:
        return  # goals are those of all queries
    ratios = [row["keep over auto"] for row in orders]
    result.add_goal(Goal("keep over auto, least of the queries", min(ratios), EACH_BAR))
    median = statistics.median(ratios)
    result.add_goal(Goal("keep over auto, median", median, MEDIAN_BAR, MEDIAN_AIM))
    least = min(row["every row over auto"] for row in pushed)
    result.add_goal(Goal("every row over auto, least", least, PUSHED_BAR, PUSHED_AIM))
    tokens = max(abs(row["EXPLAIN: prompt tokens off"]) for row in orders)
    result.add_goal(Goal("EXPLAIN: prompt tokens off", tokens, 0, None, True, "tokens"))
    points = max(abs(row["EXPLAIN: hit rate, points off"]) for row in orders)
    result.add_goal(Goal("EXPLAIN: hit rate, points off", points, 1, 0.2, True, "points"))
    seconds = max(abs(row["EXPLAIN: seconds off"]) for row in orders)
    result.add_goal(Goal("EXPLAIN: seconds off", 100 * seconds, 20, 10, True, "%"))
    planning = max(row["planning"] for row in orders)
    result.add_goal(Goal("planning and bookkeeping", 100 * planning, 2, 1, True, "%"))


if __name__ == "__main__":
    main()
