# SPDX-License-Identifier: Apache-2.0
"""Tables: what the prefix cache finds in each order of rows and fields, and finding the order.

The hit rate is that of the papers: characters of the values alone, which an unlimited cache has of
an earlier row, of all. "GGR" is greedy group recursion with the functional dependencies given;
"per_row" finds them. "blocks": the share of prompt tokens that a cache of KV blocks has, where a
row is an instruction and a line for each field; a token is up to four letters or digits, or one
other character. Tables are made, of the shape of the papers' ones, unless `--data` names a folder
that holds beer.csv, marvel-wikia-data.csv and movies_small.csv; only these have goals for the hit
rate. "CPU s" is without what other processes take.
"""

import re
import resource
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.tables.data import SOURCES, Source, Table, find_table, made_sales
from benchmarks.tables.ggr import greedy_group_recursion
from vllm_relay.tables.ordering import (
    BlockCache,
    Column,
    FieldPrompts,
    TableOrder,
    choose_order,
    compose,
    encode_columns,
    render_value,
)
from vllm_relay.tables.ordering.order import ORDERS

INSTRUCTION = (
    "You are given one row of a table as lines with the name of a field and its value. Say in one "
    "word whether whoever wrote it is content. Answer with Yes or No, and with nothing else. "
)
SPEED_BARS_S = {"beer": (3, 1.5)}
LARGE_BARS_S = (120, 60)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Timed:
    wall_s: float
    cpu_s: float


def timed(call: Callable[[], Found]) -> tuple[Found, Timed]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = call()
    return found, Timed(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


class Pieces:
    """A tokenizer: pieces of up to four letters or digits, and all other characters."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        pieces = re.findall(r" ?\w{1,4}|\W", text)
        return [self._ids.setdefault(piece, len(self._ids)) for piece in pieces]


def hit_rate(columns: list[Column], order: TableOrder) -> float:
    """Percent of all characters."""
    total = sum(int(column.lengths[column.codes].sum()) for column in columns)
    return 100 * compose(columns, order).total_shared() / max(total, 1)


def measure_hit_rates(name: str, source: Source, table: Table, rounds: int) -> Row:
    columns, encoding = timed(lambda: encode_columns(table, render_value))
    names = list(table)
    equivalent = [
        [names.index(field) for field in fields]
        for fields in source.equivalent
        if set(fields) <= set(names)
    ]
    row: Row = {"table": name, "rows": len(columns[0].codes), "fields": len(columns)}
    for order in ("keep", "fixed"):
        row[f"{order} %"] = hit_rate(columns, ORDERS[order](columns))
    ggr, taken = timed(lambda: greedy_group_recursion(columns, equivalent))
    row["GGR %"] = hit_rate(columns, ggr)
    solved = [timed(lambda: ORDERS["per_row"](columns)) for _ in range(rounds)]
    row["per_row %"] = hit_rate(columns, solved[0][0])
    row["GGR s"] = taken.wall_s
    row["encode s"] = encoding.wall_s
    row["per_row s"] = min(each.wall_s for _, each in solved)
    row["per_row CPU s"] = min(each.cpu_s for _, each in solved)
    return row


def measure_blocks(name: str, table: Table, block_size: int, sizes: list[int | None]) -> list[Row]:
    pieces = Pieces()
    columns = encode_columns(table, tokenize=lambda texts: map(pieces, texts))
    prompts = FieldPrompts(columns, pieces(INSTRUCTION), pieces("Answer:"))
    keep = ORDERS["keep"](columns)
    total = sum(len(part.tokens) for part in prompts(keep))
    rows: list[Row] = []
    for num_blocks in sizes:
        chosen = choose_order(columns, "auto", BlockCache(block_size, num_blocks), prompts)
        shares = {
            f"{order} %": 100 * cached / max(total, 1)
            for order, cached in chosen.cached_tokens.items()
        }
        row: Row = {
            "table": name,
            "tokens a prompt": total / max(len(keep.rows), 1),
            "cache blocks": num_blocks or "no limit",
            **shares,
            "auto": chosen.name,
        }
        rows.append(row)
    return rows


def measure_large(rows: int) -> Row:
    table = made_sales(rows)
    before_gib = peak_memory_gib()
    columns, encoding = timed(lambda: encode_columns(table, render_value))
    _, solving = timed(lambda: ORDERS["per_row"](columns))
    return {
        "rows": rows,
        "fields": len(columns),
        "encode s": encoding.wall_s,
        "encode CPU s": encoding.cpu_s,
        "per_row s": solving.wall_s,
        "per_row CPU s": solving.cpu_s,
        "table GiB": before_gib,
        "peak GiB": peak_memory_gib(),
    }


def peak_memory_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--data", type=Path, help="folder with the papers' tables")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the large (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens (%(default)s)")
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[2000, 200], help="of caches (%(default)s)"
    )
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.rounds = 2000, 1
    tables = load_tables(options)
    options.tables = "given" if options.data else "made"
    result = Result.begin(__file__, __doc__, options)
    large = measure_large(options.rows)
    rates = [
        measure_hit_rates(name, SOURCES[name], table, options.rounds)
        for name, table in tables.items()
    ]
    result.add_table("Hit rate of an unlimited cache, characters of the values", rates)
    sizes: list[int | None] = [None, *options.blocks]
    blocks = [
        row
        for name, table in tables.items()
        for row in measure_blocks(name, table, options.block_size, sizes)
    ]
    result.add_table(f"Prompt tokens found in blocks of {options.block_size}", blocks)
    result.add_table("Finding the order of a large table", [large])
    add_goals(result, rates, blocks, large, options.tables == "given")
    result.end(options)


def load_tables(options: Namespace) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for name, source in SOURCES.items():
        if options.data is None:
            tables[name] = source.made(min(source.rows, options.rows))
            continue
        found = find_table(source, options.data)
        if found is None:
            raise SystemExit(f"no {source.file} in the folder of --data or below: put it there")
        rows = options.rows if options.smoke else None
        tables[name] = {field: cells[:rows] for field, cells in found.items()}
    return tables


def add_goals(result: Result, rates: list[Row], blocks: list[Row], large: Row, given: bool) -> None:
    for row in rates:
        source = SOURCES[row["table"]]
        if given:
            what = f"{row['table']}: hit rate of per_row"
            result.add_goal(Goal(what, row["per_row %"], source.bar, source.aim, unit="%"))
        for other in ("fixed", "GGR"):
            points = row["per_row %"] - row[f"{other} %"]
            what = f"{row['table']}: per_row over {other}, points"
            result.add_goal(Goal(what, points, 0, unit="points"))
        if row["table"] in SPEED_BARS_S:
            bar_s, aim_s = SPEED_BARS_S[row["table"]]
            seconds = row["encode s"] + row["per_row s"]
            what = f"{row['table']}: encoding and per_row, seconds"
            result.add_goal(Goal(what, seconds, bar_s, aim_s, True, "s"))
    least = min(row[f"{row['auto']} %"] - row["fixed %"] for row in blocks)
    result.add_goal(Goal("least of auto over fixed in blocks, points", least, 0, unit="points"))
    seconds = large["encode s"] + large["per_row s"]
    what = f"{large['rows']:,} x {large['fields']}: encoding and per_row, seconds"
    result.add_goal(Goal(what, seconds, *LARGE_BARS_S, True, "s"))


if __name__ == "__main__":
    main()
