# SPDX-License-Identifier: Apache-2.0
"""Queries with llm() over tables: what a server is sent, beside LOTUS, Daft and a plain loop.

The five kinds of queries of Liu et al., 2024, over made tables, asked of one server that answers by
rule and counts what a prefix cache in blocks of 16 tokens finds of each prompt, in the order in
which they come. Each query meets an empty cache; the block used longest ago leaves first. Prompts
sent at once arrive in an order that differs a little from run to run, and with it what a bounded
cache finds. All systems give the same results, or the benchmark ends. vllm-relay sends tokens to a
server that says it is vLLM, and messages to any other; the rivals send messages, with the same
questions and fields, as their users write them. "caller's order" is OpenAI's client in a loop over
the rows. LOTUS puts fields in the order of a Python set, which differs from process to process:
several are shown. Tokens are those of a byte-level BPE that is trained on Python's manual, and so
knows no system's wording better than another's.

DuckDB's Flock is left out: its extension comes from a server of its own alone.
"""

import json
import os
import pydoc_data.topics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers import AutoTokenizer

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.tables.database import Database
from benchmarks.tables.dummy_model import TINY, save_model
from benchmarks.tables.queries import (
    ANSWER,
    QUERIES,
    RECOMMENDATION,
    REVIEWER,
    SCORE,
    SENTIMENT,
    Call,
)
from benchmarks.tables.rivals.oracle import Oracle, Results, expected_results
from benchmarks.tables.rivals.prefix_cache_server import Asked, prefix_cache_server
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.sql.connection import connect

RELAY, RELAY_CHAT, LOOP = "vllm-relay", "vllm-relay, messages", "caller's order"
KINDS = ("projection", "filter", "several", "aggregation", "retrieval")
SQL = dict(zip(KINDS, (query.sql for query in QUERIES), strict=True)) | {
    "several": f"SELECT id, {RECOMMENDATION.sql} AS answer FROM films "
    f"WHERE {SENTIMENT.sql} = 'NEGATIVE'"
}
NAMES = dict(zip(KINDS, (query.name for query in QUERIES), strict=True))
COLUMNS = {"prompts": 1, "prompt tokens": 1, "hit rate": -1, "uncached tokens": 1}
"""What is counted, and whether less (1) or more (-1) of it is better."""
PROCESS_TIMEOUT_S = 120

Urls = dict[str, str]


def check_results(system: str, found: Results, expected: Results) -> None:
    for kind, result in found.items():
        if kind == "aggregation":
            rounded = {title: round(mean, 6) for title, mean in result.items()}
            is_right = rounded == {title: round(mean, 6) for title, mean in expected[kind].items()}
        else:
            is_right = sorted(result) == sorted(expected[kind])
        if not is_right:
            raise SystemExit(f"{system} has another result of {NAMES[kind]} than expected")


def ask_relay(database: Database, urls: Urls) -> Results:
    results: Results = {}
    for kind, url in urls.items():
        options = JobOptions(show_progress=False)
        with connect(database.connect(), engine=ServerEngine(url), options=options) as connection:
            result = connection.sql(SQL[kind])
            assert result is not None
            rows = result.fetchall()
            assert not result.errors, result.errors
        results[kind] = dict(rows) if kind == "aggregation" else [row[0] for row in rows]
    return results


class Loop:
    """OpenAI's client, row after row, with the fields as they are."""

    def __init__(self, database: Database) -> None:
        self._films = _rows(database.films)
        self._questions = _rows(database.questions)

    def run(self, urls: Urls) -> Results:
        return {kind: getattr(self, kind)(OpenAI(base_url=f"{url}/v1", api_key="none"))
                for kind, url in urls.items()}  # fmt: skip

    def projection(self, client: OpenAI) -> list[int]:
        for film in self._films:
            _ask(client, RECOMMENDATION, film)
        return [film["id"] for film in self._films]

    def filter(self, client: OpenAI) -> list[int]:
        return [film["id"] for film in self._negative(client)]

    def several(self, client: OpenAI) -> list[int]:
        negative = self._negative(client)
        for film in negative:
            _ask(client, RECOMMENDATION, film)
        return [film["id"] for film in negative]

    def aggregation(self, client: OpenAI) -> dict[str, float]:
        scores: dict[str, list[int]] = {}
        for film in self._films:
            scores.setdefault(film["title"], []).append(int(_ask(client, SCORE, film)))
        return {title: sum(found) / len(found) for title, found in scores.items()}

    def retrieval(self, client: OpenAI) -> list[int]:
        for question in self._questions:
            _ask(client, ANSWER, question)
        return [question["id"] for question in self._questions]

    def _negative(self, client: OpenAI) -> list[Row]:
        return [film for film in self._films if _ask(client, SENTIMENT, film) == "NEGATIVE"]


def _rows(table: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _ask(client: OpenAI, call: Call, row: Row) -> str:
    lines = [f"{name}: {json.dumps(row[name])}" for name in call.fields]
    head = f"{without_braces(call.text)} {call.question.output.description}".rstrip()
    completion = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "\n".join([head, *lines])}],
        max_tokens=call.max_tokens,
        temperature=0,
    )
    return completion.choices[0].message.content or ""


def without_braces(text: str) -> str:
    return text.replace("{", "").replace("}", "")


class Rival:
    """A library in an environment of its own."""

    def __init__(self, python: Path, system: str, database: Database, hash_seed: int = 0) -> None:
        self.version = ""
        self._python = python
        self._system = system
        self._hash_seed = hash_seed
        passages = ["\n".join(found) for found in database.questions["passages"]]
        self._given = {
            "system": system,
            "films": database.films,
            "questions": database.questions | {"passages": passages},
            "texts": {
                "preface": REVIEWER,
                "recommendation": RECOMMENDATION.text,
                "sentiment": SENTIMENT.text,
                "score": SCORE.text,
                "answer": ANSWER.text,
            },
        }

    def run(self, urls: Urls) -> Results:
        if self._system == "daft":
            # its third query in a process may wait forever for replies that are there
            parts = [self._run({kind: url}) for kind, url in urls.items()]
            return {kind: found for part in parts for kind, found in part.items()}
        return self._run(urls)

    def _run(self, urls: Urls) -> Results:
        try:
            done = subprocess.run(
                [self._python, Path(__file__).with_name("rivals") / "rivals_main.py"],
                input=json.dumps({**self._given, "urls": urls}),
                text=True,
                capture_output=True,
                timeout=PROCESS_TIMEOUT_S,
                env={**os.environ, "PYTHONHASHSEED": str(self._hash_seed), "DO_NOT_TRACK": "true"},
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{self._system} has not ended {', '.join(urls)} after {PROCESS_TIMEOUT_S} s"
            ) from None
        if done.returncode:
            raise SystemExit(
                f"{self._system} ended with status {done.returncode} in the environment of "
                f"--rivals {self._python}; install lotus-ai and daft[openai] there:\n"
                f"{done.stderr[-4000:]}"
            )
        found = json.loads(done.stdout.splitlines()[-1])
        self.version = found["version"]
        return found["results"]


@dataclass(frozen=True)
class System:
    """
    Attributes:
        name: in tables.
        run: its queries, each against the server of its address.
        is_vllm: whether its server says that it is vLLM.
    """

    name: str
    run: Callable[[Urls], Results]
    is_vllm: bool = False


class Measurement:
    """What the systems send, each query to a server of its own with an empty cache."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._oracle = Oracle(database.films["review"])
        self._expected = expected_results(database)

    def run(self, system: System, num_blocks: int | None) -> dict[str, Asked]:
        """What was asked, by kind of query."""
        with ExitStack() as running:
            servers = {
                kind: running.enter_context(
                    prefix_cache_server(
                        self._folder,
                        self._tokenizer,
                        self._oracle.answer,
                        num_blocks=num_blocks,
                        is_vllm=system.is_vllm,
                    )
                )
                for kind in KINDS
            }
            results = system.run({kind: server.url for kind, (server, _) in servers.items()})
            check_results(system.name, results, self._expected)
            return {kind: asked for kind, (_, asked) in servers.items()}


def ask_all(
    measurement: Measurement, database: Database, num_blocks: int | None, options: Namespace
) -> Iterator[tuple[str, dict[str, Asked]]]:
    """Each system's name, and what it asked; of several processes of LOTUS, each."""

    def relay(urls: Urls) -> Results:
        return ask_relay(database, urls)

    yield RELAY, measurement.run(System(RELAY, relay, is_vllm=True), num_blocks)
    if num_blocks is not None:
        return  # only vLLM says how large its cache is
    yield RELAY_CHAT, measurement.run(System(RELAY_CHAT, relay), None)
    yield LOOP, measurement.run(System(LOOP, Loop(database).run), None)
    if options.rivals is None:
        return
    daft = Rival(options.rivals, "daft", database)
    asked = measurement.run(System("Daft", daft.run), None)
    yield f"Daft {daft.version}", asked
    for hash_seed in range(options.hash_seeds):
        lotus = Rival(options.rivals, "lotus", database, hash_seed)
        asked = measurement.run(System("LOTUS", lotus.run), None)
        yield f"LOTUS {lotus.version}, {1 + hash_seed}", asked


def rows_of(asked: dict[str, dict[str, Asked]], num_blocks: int | None) -> list[Row]:
    """A row for each query and system, then one for each system's total."""
    counted = {
        (kind, system): (len(one.prompts), one.num_tokens, one.num_found_tokens(num_blocks))
        for system, by_kind in asked.items()
        for kind, one in by_kind.items()
    }
    rows = [_row(NAMES[kind], system, *counted[kind, system]) for kind in KINDS for system in asked]
    for system in asked:
        each = [counted[kind, system] for kind in KINDS]
        rows.append(_row("all", system, *map(sum, zip(*each, strict=True))))
    return rows


def _row(query: str, system: str, prompts: int, tokens: int, found: int) -> Row:
    return {
        "query": query,
        "system": system,
        "prompts": prompts,
        "prompt tokens": tokens,
        "hit rate": found / tokens,
        "uncached tokens": tokens - found,
    }


def where_rivals_lead(cache: str, rows: list[Row]) -> list[Row]:
    """Columns in which another system is better than vllm-relay, which is sent tokens."""
    relay = {row["query"]: row for row in rows if row["system"] == RELAY}
    found = []
    for row in rows:
        if row["system"].startswith(RELAY):
            continue
        for column, sign in COLUMNS.items():
            own = relay[row["query"]][column]
            if sign * row[column] < sign * own:
                found.append(
                    {
                        "cache": cache,
                        "query": row["query"],
                        "column": column,
                        "system": row["system"],
                        "its": row[column],
                        "vllm-relay's": own,
                    }
                )
    return found


def add_goals(result: Result, rows: list[Row]) -> None:
    relay = {row["query"]: row["uncached tokens"] for row in rows if row["system"] == RELAY}
    others = [row for row in rows if not row["system"].startswith(RELAY)]
    least = min(row["uncached tokens"] / relay[row["query"]] for row in others)
    result.add_goal(Goal("uncached tokens, least of others over relay's", least, 1, 1.5))


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument(
        "--rivals", type=Path, metavar="PYTHON",
        help="interpreter of an environment with lotus-ai and daft[openai]; without it they are "
        "left out",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=200, help="of a table (%(default)s)")
    parser.add_argument(
        "--cache-blocks", type=int, default=200, help="of the bounded cache (%(default)s)"
    )
    parser.add_argument(
        "--hash-seeds", type=int, default=3, help="processes of LOTUS (%(default)s)"
    )
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.rivals = 24, None
    result = Result.begin(__file__, __doc__, options)
    lead: list[Row] = []
    all_rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        folder = Path(name)
        database = Database(folder, None, options.rows)
        save_model(TINY, pydoc_data.topics.topics.values(), folder)
        measurement = Measurement(folder, database)
        asked: dict[str, dict[str, Asked]] = {}
        for num_blocks in (None, options.cache_blocks):
            asked |= ask_all(measurement, database, num_blocks, options)
            cache = "no limit" if num_blocks is None else f"{num_blocks} blocks"
            rows = rows_of(asked, num_blocks)
            result.add_table(f"What a server is sent; cache: {cache}", rows)
            lead += where_rivals_lead(cache, rows)
            all_rows += [{**row, "query": f"{row['query']} {cache}"} for row in rows]
    result.add_table("Where another system is ahead of vllm-relay", lead)
    add_goals(result, all_rows)
    result.end(options)


if __name__ == "__main__":
    main()
