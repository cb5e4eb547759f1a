# SPDX-License-Identifier: Apache-2.0
"""Semantic operators: prompts and their tokens against asking about everything; recall, precision.

The model answers by rule, so that the right result is known; what it is asked is counted, with a
byte-level BPE trained on Python's manual. "uncached" tokens are those that an unlimited prefix
cache with blocks of 16 tokens has not. Without an operator every row is asked about, every pair, in
the tables' order; the first rows are found by quickselect and quicksort, and groups are summed up
by prompts that add a record to the answer so far. Figures are means over seeds, of which each makes
another table, other scores and another sample (asking about every row or pair: the first seed);
"least" is that of the worst seed, "below" the share of the seeds in which the recall or the
precision was less than was promised with a confidence of 0.95. Nothing is timed.
"""

import pydoc_data.topics
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.tables.dummy_model import TINY, save_model
from benchmarks.tables.semantic.baselines import prompts_of, quickselect, refined, similar_pairs
from benchmarks.tables.semantic.cases import Pairs, Statements, amounts, copied, ranked
from benchmarks.tables.semantic.engine import KnownEngine, ScoringEngine, asked, means
from vllm_relay.tables import (
    JobOptions,
    llm_agg,
    llm_filter,
    llm_join,
    llm_map,
    llm_top_k,
)
from vllm_relay.tables.semantic.record_lists import records_of_table

KEEP = JobOptions(order="keep", show_progress=False)
QUIET = JobOptions(show_progress=False)
RECALL = PRECISION = 0.9
SIMILARITY = 0.9
WRONG_SHARE = 0.05
FILTERS = {
    "30% true, good scores": (0.3, 0.6),
    "30% true, poor scores": (0.3, 1.5),
    "5% true, good scores": (0.05, 0.6),
    "30% true, scores that say nothing": (0.3, 50.0),
}
"""Share of true rows, and spread of the scores."""
JOINS = {"good vectors": 0.4, "poor vectors": 1.2}


def shares_kept(found: Any, is_true: Any) -> dict[str, float]:
    hits = int((found & is_true).sum())
    return {
        "recall": hits / max(int(is_true.sum()), 1),
        "precision": hits / max(int(found.sum()), 1),
    }


def quality(rounds: list[dict[str, float]], promised: dict[str, float]) -> Row:
    row: Row = {}
    for name, least in promised.items():
        values = [each[name] for each in rounds]
        row[name] = sum(values) / len(values)
        row[f"least {name}"] = min(values)
        row[f"{name} below"] = sum(value < least for value in values) / len(values)
    return row


def whole(rows: list[Row]) -> list[Row]:
    """With all columns in each."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def measure_filter(tokenizer: Any, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for case, (share, spread) in FILTERS.items():
        counted: dict[str, list[dict[str, float]]] = {"every row": [], "llm_filter": []}
        ask = "Does {text} of ticket {id} ask for money back?"
        cheap: list[dict[str, float]] = []
        kept: list[dict[str, float]] = []
        for seed in range(options.rounds):
            made = Statements.made(options.rows, share, spread, seed)

            def truth(row: Row, made: Statements = made) -> str:
                return str(bool(made.is_true[row["id"]])).lower()

            def score(row: Row, made: Statements = made) -> str:
                return str(made.scores[row["id"]])

            if not seed:
                every = KnownEngine(truth, tokenizer=tokenizer)
                llm_filter(made.table, ask, engine=every, options=KEEP)
                counted["every row"].append(asked(every.prompts))
            large = KnownEngine(truth, tokenizer=tokenizer)
            proxy = ScoringEngine(score, tokenizer=tokenizer, identity="small")
            result = llm_filter(
                made.table,
                ask,
                engine=large,
                proxy=proxy,
                recall=RECALL,
                precision=PRECISION,
                sample_seed=seed,
                options=QUIET,
            )
            counted["llm_filter"].append(asked(large.prompts))
            cheap.append(asked(proxy.prompts))
            kept.append(shares_kept(np.array(result.objects), made.is_true))
        promised = {"recall": RECALL, "precision": PRECISION}
        rows.append({"case": case, "how": "every row", **means(counted["every row"])})
        rows.append(
            {
                "case": case,
                "how": "llm_filter",
                **means(counted["llm_filter"]),
                "of the cheap model": means(cheap)["prompt tokens"],
                **quality(kept, promised),
            }
        )
    return rows


def measure_join(tokenizer: Any, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for case, spread in JOINS.items():
        counted: dict[str, list[dict[str, float]]] = {"every pair": [], "llm_join": []}
        ask = "Was the work in {paper} paid by {grant}?"
        kept: list[dict[str, float]] = []
        for seed in range(options.join_rounds):
            made = Pairs.made(options.join_rows, spread, seed)

            def truth(row: Row, made: Pairs = made) -> str:
                i, j = (int(row[name].split()[0][1:]) for name in ("paper", "grant"))
                return str(bool(made.is_true[i, j])).lower()

            if not seed:
                every = KnownEngine(truth, tokenizer=tokenizer)
                llm_join(made.left, made.right, ask, engine=every, options=KEEP)
                counted["every pair"].append(asked(every.prompts))
            engine = KnownEngine(truth, tokenizer=tokenizer)
            result = llm_join(
                made.left,
                made.right,
                ask,
                engine=engine,
                embeddings=made.embed,
                recall=RECALL,
                sample_seed=seed,
                options=QUIET,
            )
            counted["llm_join"].append(asked(engine.prompts))
            found = np.zeros_like(made.is_true)
            found[tuple(np.array(result.pairs).reshape(-1, 2).T)] = True
            kept.append(shares_kept(found, made.is_true))
        rows.append({"case": case, "how": "every pair", **means(counted["every pair"])})
        rows.append(
            {
                "case": case,
                "how": "llm_join",
                **means(counted["llm_join"]),
                **quality(kept, {"recall": RECALL}),
            }
        )
    return rows


def measure_top_k(tokenizer: Any, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for wrong_share in (0.0, WRONG_SHARE):
        counted: dict[str, list[dict[str, float]]] = {"quickselect": [], "llm_top_k": []}
        for seed in range(options.rounds):
            table, ranks = ranked(options.rows // 4, seed)
            errs = np.random.default_rng(seed).random((len(ranks), len(ranks))) < wrong_share

            def is_before(a: int, b: int, ranks: Any = ranks, errs: Any = errs) -> bool:
                # the same for both orders of two rows
                return bool((ranks[a] < ranks[b]) ^ errs[min(a, b), max(a, b)])

            def truth(row: Row, is_before: Any = is_before) -> str:
                a, b = (int(row[name]["text"].split()[0][1:]) for name in ("A", "B"))
                return "A" if is_before(a, b) else "B"

            engine = KnownEngine(truth, tokenizer=tokenizer)
            result = llm_top_k(
                table,
                "Which is better, going by {text}?",
                options.k,
                engine=engine,
                pivot_seed=seed,
                options=QUIET,
            )
            compared: list[tuple[int, int]] = []

            def compare(a: int, b: int, compared: Any = compared, before: Any = is_before) -> bool:
                compared.append((a, b))
                return before(a, b)

            found = quickselect(list(range(len(ranks))), options.k, compare, seed)
            assert engine.question is not None
            records = records_of_table(pa.table({"text": _json(table["text"].to_pylist())}))
            prompts = prompts_of(
                engine.question,
                tokenizer,
                [{"A": str(records[a]), "B": str(records[b])} for a, b in compared],
            )
            for how, places, given, num_rounds in (
                ("quickselect", found, prompts, len(compared)),
                ("llm_top_k", result.places, engine.prompts, result.num_rounds),
            ):
                recall = sum(ranks[place] < options.k for place in places) / options.k
                counted[how].append({**asked(given), "rounds": num_rounds, "recall": recall})
        for how, rounds in counted.items():
            recalls = [each.pop("recall") for each in rounds]
            case = f"{wrong_share:.0%} of the answers are wrong"
            rows.append(
                {
                    "case": case,
                    "how": how,
                    **means(rounds),
                    "recall": sum(recalls) / len(recalls),
                    "least recall": min(recalls),
                }
            )
    return rows


def _json(given: list[str]) -> list[str]:
    return [f'"{text}"' for text in given]


def measure_agg(tokenizer: Any, options: Namespace) -> list[Row]:
    counted: dict[str, list[dict[str, float]]] = {"record by record": [], "llm_agg": []}
    for seed in range(options.rounds):
        table = amounts(options.rows // 4, 5, seed)
        engine = KnownEngine(
            lambda row: str(
                sum(each["amount"] if isinstance(each, dict) else each for each in row["records"])
            ),
            tokenizer=tokenizer,
        )
        result = llm_agg(
            table,
            "What is the sum of {amount}, whatever {note} says?",
            by=["shop"],
            output=int,
            engine=engine,
            options=QUIET,
        )
        expected = table.group_by("shop").aggregate([("amount", "sum")])
        columns = (expected[name].to_pylist() for name in ("shop", "amount_sum"))
        sums = dict(zip(*columns, strict=True))
        if result.objects != [sums[shop] for shop in result.table["shop"].to_pylist()]:
            raise SystemExit("llm_agg has other sums than expected")
        texts = pa.table(
            {
                "amount": [str(each) for each in table["amount"].to_pylist()],
                "note": _json(table["note"].to_pylist()),
            }
        )
        records = [str(each) for each in records_of_table(texts)]
        shops = table["shop"].to_numpy()
        fields = [
            each
            for shop in np.unique(shops)
            for each in refined(
                [records[place] for place in np.flatnonzero(shops == shop)],
                table["amount"].to_numpy()[shops == shop].tolist(),
            )
        ]
        assert engine.question is not None
        plain = prompts_of(engine.question, tokenizer, fields)
        counted["record by record"].append(asked(plain))
        counted["llm_agg"].append(asked(engine.prompts))
    return [{"how": how, **means(rounds)} for how, rounds in counted.items()]


def measure_near_duplicates(tokenizer: Any, options: Namespace) -> list[Row]:
    counted: dict[str, list[dict[str, float]]] = {"every row": [], "near_duplicates": []}
    kept: list[dict[str, float]] = []
    for seed in range(options.rounds):
        shown, origins = copied(options.rows // 4, 0.4, seed)
        table = pa.table({"text": shown})
        if not seed:
            every = KnownEngine(lambda row: "yes", tokenizer=tokenizer)
            llm_map(table, "Is {text} kind?", engine=every, order="keep", show_progress=False)
            counted["every row"].append(asked(every.prompts))
        engine = KnownEngine(lambda row: row["text"], tokenizer=tokenizer)
        result = llm_map(
            table,
            "Is {text} kind?",
            engine=engine,
            near_duplicates=SIMILARITY,
            show_progress=False,
        )
        # an answer is the text that was asked about
        of_text = {text: row for row, text in reversed(list(enumerate(shown)))}
        shared = [of_text[text] for text in result.objects]
        have_similar = {i for i, _ in similar_pairs(shown, SIMILARITY)}
        others = [row for row, own in enumerate(shared) if row != own]
        right = sum(origins[row] == origins[shared[row]] for row in others)
        kept.append(
            {
                "recall": len(have_similar.intersection(others)) / max(len(have_similar), 1),
                "precision": right / max(len(others), 1),
            }
        )
        counted["near_duplicates"].append(asked(engine.prompts))
    rows = [{"how": how, **means(rounds)} for how, rounds in counted.items()]
    for name in ("recall", "precision"):
        values = [each[name] for each in kept]
        rows[-1] |= {name: sum(values) / len(values), f"least {name}": min(values)}
    return rows


def add_goals(result: Result, filters: list[Row], joins: list[Row], tops: list[Row]) -> None:
    for name, rows in (("llm_filter", filters), ("llm_join", joins)):
        for every, own in zip(rows[::2], rows[1::2], strict=True):
            what = f"{name}, {own['case']}: prompts without it over its"
            result.add_goal(Goal(what, every["prompts"] / max(own["prompts"], 1), 1))
        for promise in ("recall", "precision"):
            below = [row[f"{promise} below"] for row in rows[1::2] if f"{promise} below" in row]
            if below:
                what = f"{name}: seeds with less {promise} than was promised, largest share"
                result.add_goal(Goal(what, max(below), 0.05, lower_is_better=True, unit=""))
    for plain, own in zip(tops[::2], tops[1::2], strict=True):
        what = f"llm_top_k, {own['case']}: uncached tokens of quickselect over its"
        result.add_goal(Goal(what, plain["uncached"] / own["uncached"], 1))


def main() -> None:
    parser = argument_parser(__doc__, rounds=20)
    parser.add_argument("--rows", type=int, default=4000, help="of a table (%(default)s)")
    parser.add_argument("--join-rows", type=int, default=120, help="of each side (%(default)s)")
    parser.add_argument("--join-rounds", type=int, default=10, help="seeds of joins (%(default)s)")
    parser.add_argument("--k", type=int, default=10, help="rows of the first (%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.join_rows, options.k = 80, 6, 3
        options.rounds = options.join_rounds = 1
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        folder = Path(name)
        save_model(TINY, pydoc_data.topics.topics.values(), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        filters = measure_filter(tokenizer, options)
        title = f"llm_filter, {options.rows} rows; tokens of the large model"
        result.add_table(title, whole(filters))
        joins = measure_join(tokenizer, options)
        result.add_table(f"llm_join, {options.join_rows} x {options.join_rows} pairs", whole(joins))
        tops = measure_top_k(tokenizer, options)
        result.add_table(f"llm_top_k, the first {options.k} of {options.rows // 4} rows", tops)
        aggregates = measure_agg(tokenizer, options)
        result.add_table(f"llm_agg, sums of 5 groups of {options.rows // 4} rows", aggregates)
        copies = measure_near_duplicates(tokenizer, options)
        result.add_table(f"llm_map of {options.rows // 4} rows, 40% nearly equal", whole(copies))
    add_goals(result, filters, joins, tops)
    result.end(options)


if __name__ == "__main__":
    main()
