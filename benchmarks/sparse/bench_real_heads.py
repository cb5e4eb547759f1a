# SPDX-License-Identifier: Apache-2.0
"""What sparse attention costs a real model in quality, and what the same bytes cost others.

SmolLM2-135M-Instruct in float32, in Hugging Face transformers, computes passages densely and
continues them greedily. Each selection is then given the same tokens, of which all layers attend to
the sinks (64), the window (256) and what it selects of the other, "far" tokens.

"mean" and "p99" are of |log-probability - dense| of dense's ten likeliest tokens at each of the
tokens, "divergence" is the Kullback-Leibler divergence from dense, "same best" the share of tokens
whose likeliest token is dense's. "far keys" is the share of the far keys that a query head reads,
"of a kv head" that which any query head of its group reads, and "bytes" everything that is read of
far tokens, over all their keys and values in bfloat16: keys and values of the group's tokens, and
what a selection reads to choose them (codes: 1 byte per element of a key, a half for half a code;
means of values, bounds, representatives, centres: 2). Weights and values are those of the cache, in
float32.

"alpha" reads the keys whose weight is at least this share of the largest, found by a scan of
eight-bit codes. "remainder" scans the upper halves of these codes and reads the lower ones of
candidates; of keys that weigh less than a hundredth of the best only the values are read; and all
others count by the weight that the scan tells, times the mean values of blocks of 64 tokens. The
rivals are written after their papers, not their code, and put to work in
every layer; Quest's pages have 16 tokens, InfLLM's blocks 128 and 4 representatives (with rotary
embedding), the wave index about 16 keys a cluster, and estimates all clusters that it does not
read. Query heads of a group share what rivals read.

"not ruled out" is the share of pages of adjacent far keys whose bound (Quest's, or that of a ball)
lets a query head of the group find a key of this weight in them: what a first pass over bounds
leaves to read of the codes.

The default was chosen on the first table's texts, and the other tables are of other files. The
tasks are made after RULER, short enough in form for this model: "score" is the share of expected
strings in the greedy answer, each of whose tokens attends by the selection. Counts, not times.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.sparse.real_heads import ruler
from benchmarks.sparse.real_heads.errors import LEAST_ERROR, Errors, Summary, at_bytes
from benchmarks.sparse.real_heads.model import Context, Read, RealModel
from benchmarks.sparse.real_heads.page_bounds import PageBounds
from benchmarks.sparse.real_heads.selections import (
    DEFAULT_ALPHA,
    InfLLM,
    Quest,
    Range,
    Remainder,
    Selection,
    TopK,
    Wave,
    Window,
)
from benchmarks.sparse.real_heads.texts import Passage, passages
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.smollm2.download import smollm2_folder

OURS = Remainder(DEFAULT_ALPHA)
OLD_DEFAULT = Range(1e-2)
RANGES: list[Selection] = [
    *(Range(alpha) for alpha in (1e-2, 1e-3, 1e-4)),
    *(Remainder(alpha) for alpha in (1e-2, 1e-3, 5e-4, 2e-4)),
]
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
RIVALS: dict[str, Sequence[Selection]] = {
    "sinks and a longer window": [Window(share) for share in (0.0, *SHARES)],
    "best k, oracle": [TopK(k) for k in (64, 256, 1024, 2048)],
    "alpha alone": [Range(alpha) for alpha in (1e-2, 1e-3, 1e-4, 1e-5)],
    "Quest": [Quest(share, shared=True) for share in SHARES],
    "InfLLM": [InfLLM(share, shared=True) for share in SHARES],
    "wave index": [Wave(share, shared=True) for share in SHARES],
}
ASKED: list[Selection] = [OURS, OLD_DEFAULT, Quest(0.22, shared=True), Window(0.28)]
"""To do the tasks; the rivals read about what ours does behind the passages."""
WEAK = 0.2  # dense's own score below which answers tell nothing


def compare(
    model: RealModel, texts: Sequence[Passage], selections: Sequence[Selection], num_tokens: int
) -> dict[str, list[tuple[str, Errors]]]:
    """By selection: (kind of text, errors) of each passage."""
    found: dict[str, list[tuple[str, Errors]]] = defaultdict(list)
    for kind, token_ids in texts:
        context = model.context(token_ids[:-1])
        answer = model.greedy(context, token_ids[-1:], num_tokens)
        forced = [token_ids[-1], *answer[:-1]]
        dense, _ = model.logprobs(context, forced, None)
        for selection in selections:
            logprobs, read = model.logprobs(context, forced, selection)
            found[selection.name].append((kind, Errors.between(dense, logprobs, read)))
        print(f"# {kind}, {len(token_ids):,} tokens and {len(forced)} behind them", flush=True)
    return found


def summary_row(name: str, summary: Summary) -> Row:
    return {
        "beyond sinks and window": name,
        "far keys": summary.read.keys,
        "of a kv head": summary.read.group_keys,
        "bytes": summary.read.bytes,
        "mean": summary.mean,
        "p99": summary.p99,
        "divergence": summary.divergence,
        "same best": summary.same_best,
    }


def same_bytes_rows(summaries: dict[str, Summary]) -> list[Row]:
    """Each rival's errors at the bytes of ours, over those of ours."""
    ours = summaries[OURS.name]
    rows: list[Row] = []
    for rival, selections in RIVALS.items():
        curve = [summaries[selection.name] for selection in selections]
        num_bytes = [each.read.bytes for each in curve]
        row: Row = {"rival at the same bytes": rival, "bytes": ours.read.bytes}
        for name in ("mean", "p99", "divergence"):
            error = at_bytes(ours.read.bytes, num_bytes, [getattr(each, name) for each in curve])
            row[f"{name} over ours"] = error and error / max(getattr(ours, name), LEAST_ERROR)
        rows.append(row)
    return rows


class Tasks:
    """Scores and log-probabilities of right answers, by (task, length) and selection."""

    def __init__(
        self, model: RealModel, selections: dict[str, Selection], num_questions: int
    ) -> None:
        self._model, self._selections = model, selections
        self._num_questions = num_questions
        self._scores: dict[tuple[str, int], dict[str, list[float]]] = {}
        self._logprobs: dict[tuple[str, int], dict[str, list[float]]] = {}
        self._read: dict[str, list[Read]] = defaultdict(list)

    def ask(self, num_tokens: int, seed: int) -> None:
        for haystack in ruler.haystacks(self._model.tokenizer, num_tokens, seed):
            encoded = self._model.tokenizer.encode(haystack.text, verbose=False)
            context = self._model.context(encoded)
            for question in haystack.questions[: self._num_questions]:
                self._ask(context, question, num_tokens)
        print(f"# tasks of {num_tokens:,} tokens, seed {seed}", flush=True)

    def _ask(self, context: Context, question: ruler.Question, num_tokens: int) -> None:
        key = question.task, num_tokens
        scores = self._scores.setdefault(key, defaultdict(list))
        logprobs = self._logprobs.setdefault(key, defaultdict(list))
        prompt = self._model.tokenizer.encode(question.prompt)
        right = self._model.tokenizer.encode(question.answer)
        dense: list[int] = []
        for name, selection in {"dense": None, **self._selections}.items():
            answer = self._model.greedy(context, prompt, question.num_tokens, selection, dense)
            dense = dense or answer
            scores[name].append(question.score(self._model.tokenizer.decode(answer)))
            found, read = self._model.logprobs_behind(context, prompt, right, selection)
            logprobs[name].append(found.mean().item())
            self._read[name].append(read)

    def score_rows(self) -> list[Row]:
        rows = [_means(key, scores) for key, scores in self._scores.items()]
        read = {name: Read.mean(each).bytes for name, each in self._read.items()}
        told = [row for row in rows if row["dense"] >= WEAK]
        if told:
            means = {name: float(np.mean([row[name] for row in told])) for name in read}
            rows.append({"task": f"mean where dense has {WEAK} or more", "tokens": None, **means})
        return [*rows, {"task": "bytes", "tokens": None, **read}]

    def logprob_rows(self) -> list[Row]:
        return [_means(key, logprobs) for key, logprobs in self._logprobs.items()]


def _means(key: tuple[str, int], by_name: dict[str, list[float]]) -> Row:
    means = {name: float(np.mean(each)) for name, each in by_name.items()}
    return {"task": key[0], "tokens": key[1], **means}


def add_goals(result: Result, summaries: dict[str, Summary], rows: list[Row]) -> None:
    ours = summaries[OURS.name]
    for what, value, bar, aim in (
        ("mean difference of log-probabilities", ours.mean, 0.02, 0.005),
        ("p99 difference of log-probabilities", ours.p99, 0.1, 0.03),
        ("far keys that a kv head reads", ours.read.group_keys, 0.25, 0.125),
    ):
        what = f"real heads, {OURS.name}: {what}"
        result.add_goal(Goal(what, value, bar, aim, lower_is_better=True, unit=""))
    for row in rows:
        what = f"real heads, same bytes, {row['rival at the same bytes']}: mean error over ours"
        result.add_goal(Goal(what, row["mean over ours"], 1.5, 3))


def measure_passages(options: Namespace, result: Result, model: RealModel) -> None:
    def texts(part: str, lengths: dict[str, list[int]]) -> list[Passage]:
        return [
            passage
            for kind, wanted in lengths.items()
            for passage in passages(model.tokenizer, kind, part, wanted)
        ]

    chosen_on = texts("choosing", {"English": options.choose_on, "code": options.choose_on})
    if chosen_on:
        found = compare(model, chosen_on, RANGES, options.output_tokens)
        result.add_table(
            f"Texts on which the default was chosen: {len(chosen_on)} passages",
            [summary_row(name, Summary.of([e for _, e in each])) for name, each in found.items()],
        )

    reported = texts("reporting", {"English": options.english, "code": options.code})
    selections = list(dict.fromkeys([*RANGES, *(s for each in RIVALS.values() for s in each)]))
    pages = PageBounds((OLD_DEFAULT.alpha, OURS.alpha), (8, 16, 64))
    found = compare(model, reported, [*selections, pages], options.output_tokens)
    del found[pages.name]
    summaries = {name: Summary.of([e for _, e in each]) for name, each in found.items()}
    lengths = [len(passage.token_ids) for passage in reported]
    where = f"{len(lengths)} passages of {min(lengths):,} to {max(lengths):,} tokens"
    result.add_table(
        f"Other texts, {where}, {options.output_tokens} tokens behind each",
        [summary_row(name, summary) for name, summary in summaries.items()],
    )
    rows = same_bytes_rows(summaries)
    result.add_table(f"Errors at the bytes of {OURS.name}", rows)
    if options.stretch == 1:
        add_goals(result, summaries, rows)
    by_kind = [
        summary_row(f"{name}: {kind}", Summary.of([e for k, e in found[name] if k == kind]))
        for name in (OURS.name, OLD_DEFAULT.name)
        for kind in dict.fromkeys(passage.kind for passage in reported)
    ]
    result.add_table("English and code", by_kind)
    result.add_table("Pages of adjacent keys that bounds rule out", pages.rows())


def measure_dense(options: Namespace, result: Result, model: RealModel) -> None:
    """How dense attention predicts one end of a text behind more and more of what is before it."""
    longest, end_tokens = max(options.dense_tokens), options.output_tokens
    kind, token_ids = passages(
        model.tokenizer, "English", "reporting", [longest + end_tokens]
    )[0]  # fmt: skip
    end = token_ids[-end_tokens:]
    rows: list[Row] = []
    for num_tokens in options.dense_tokens:
        before = token_ids[longest - num_tokens : longest]
        logprobs, _ = model.logprobs_behind(model.context(before[:-1]), before[-1:], end, None)
        rows.append({"tokens before": num_tokens, "log-probability": logprobs.mean().item()})
        print(f"# {kind}, {num_tokens:,} tokens before {end_tokens}", flush=True)
    result.add_table("Dense attention: the same end of a text behind more and more of it", rows)


def measure_tasks(options: Namespace, result: Result, model: RealModel) -> None:
    tasks = Tasks(model, {selection.name: selection for selection in ASKED}, options.questions)
    for num_tokens in options.task_tokens:
        for seed in range(options.task_seeds):
            tasks.ask(num_tokens, seed)
    result.add_table("Tasks after RULER: scores", tasks.score_rows())
    result.add_table(
        "Tasks after RULER: mean log-probability of the right answer's tokens",
        tasks.logprob_rows(),
    )


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--choose-on", type=int, nargs="*", default=[4400], metavar="TOKENS",
                        help="lengths, of English and of code (%(default)s)")  # fmt: skip
    parser.add_argument("--english", type=int, nargs="*", default=[4200, 7600],
                        metavar="TOKENS", help="lengths (%(default)s)")  # fmt: skip
    parser.add_argument("--code", type=int, nargs="*", default=[5600],
                        metavar="TOKENS", help="lengths (%(default)s)")  # fmt: skip
    parser.add_argument("--output-tokens", type=int, default=48, help="(%(default)s)")
    parser.add_argument("--task-tokens", type=int, nargs="*", default=[2048, 4096, 7680],
                        metavar="TOKENS", help="lengths (%(default)s)")  # fmt: skip
    parser.add_argument("--task-seeds", type=int, default=2, help="of each length (%(default)s)")
    parser.add_argument("--stretch", type=float, default=1, metavar="TIMES",
                        help="positions that it was trained on, by YaRN (%(default)s)")  # fmt: skip
    parser.add_argument("--dense-tokens", type=int, nargs="*", default=[], metavar="TOKENS",
                        help="before an end that dense attention predicts; none")  # fmt: skip
    parser.add_argument("--questions", type=int, default=5,
                        help="of a haystack, at most (%(default)s)")  # fmt: skip
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.choose_on, options.english, options.code = [450], [450], [450]
        options.output_tokens, options.task_tokens, options.task_seeds = 4, [600], 1
        options.dense_tokens = [300, 600]
        options.questions = 1
    torch.set_num_threads(options.threads)
    model = RealModel.load(smollm2_folder(), options.stretch)
    if options.dense_tokens:
        measure_dense(options, result, model)
    if options.english or options.code:
        measure_passages(options, result, model)
    if options.task_tokens:
        measure_tasks(options, result, model)
    result.end(options)


if __name__ == "__main__":
    main()
