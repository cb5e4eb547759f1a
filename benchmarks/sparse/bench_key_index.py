# SPDX-License-Identifier: Apache-2.0
"""How fast the keys that matter are found: recall against time, beside other vector searches.

Keys and queries are made up (`benchmarks/sparse/heads/corpus.py`), float32, and inner products are
what counts. One thread; CPU time of that thread, one query per call unless it says "batch", all
contenders in turn at every effort, round after round; medians. Recall is measured against a scan of
all keys. Times at a recall are interpolated between the two efforts around it; "<=" where even the
lowest effort has more recall, "-" where none has as much. "effort" is what a search is allowed:
nodes kept by a graph, lists probed by an inverted file. "distances" are keys scored per query.
Ratios are medians over the rounds.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.sparse.heads.corpus import KINDS, Head
from benchmarks.sparse.heads.sets import HeadSet, MadeSet, Sizes, model_sets, recall_sets
from benchmarks.sparse.searches import curves, exact, mass_bounds, own_searches
from benchmarks.sparse.searches.built import Built, build
from benchmarks.sparse.searches.contenders import Contender, OwnIndex, Reference, own_contenders
from benchmarks.sparse.searches.rivals import RIVALS, installed_rivals
from benchmarks.support.formatting import Row, show
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.sparse import Dipr, QueryType, TopK

PARTS = ("curves", "groups", "ranges", "prefixes", "errors", "bounds")
RECALLS = (0.95, 0.98, 0.99)
GOAL_K, GOAL_RECALL = 100, 0.95
RANGE_BETA = 50.0
ERROR_QUERIES: tuple[QueryType, ...] = (
    *(TopK(k) for k in (10, 30, 100, 300, 1000, 3000)),
    *(Dipr(beta=beta) for beta in (10.0, 20.0, 35.0, 50.0, 80.0, 110.0)),
)
ERROR_TESTS = 200
MANY_KEYS = 1_000_000


class Study:
    """The contenders on one set of keys, and what they are asked."""

    def __init__(
        self,
        result: Result,
        options: Namespace,
        head_set: HeadSet,
        classes: Sequence[type[Contender]],
    ) -> None:
        self.result, self.options, self.set = result, options, head_set
        self.head = head_set.head
        self.title = f"{self.head.name}, {self.head.num_keys:,} keys"
        self.built = self._build(self.head, classes)
        self.own = [b.contender for b in self.built if isinstance(b.contender, OwnIndex)]

    def _build(
        self, head: Head, classes: Sequence[type[Contender]], variant: str = ""
    ) -> list[Built]:
        set_name = f"{self.set.file_name}{variant}"
        built = []
        for contender_class in classes:
            one = build(
                contender_class, head.keys, head.train_queries, self.options.cache, set_name
            )
            print(f"# {set_name}: {one.contender.name} built in {one.build_cpu_s:.1f} CPU s",
                  flush=True)  # fmt: skip
            built.append(one)
        return built

    @property
    def has_goals(self) -> bool:
        return self.head.name in ("rope", "hubs") and self.head.num_keys < MANY_KEYS

    def run(self) -> None:
        for part in self.options.parts:
            getattr(self, f"_{part}")()

    def _curves(self) -> None:
        queries = self.head.queries[:, 0]
        for k in self.options.top_k:
            if k > self.head.num_keys:
                continue
            truth = exact.top_k(queries, self.head.keys, k)
            found = [
                curves.sweep(one.contender, queries, self.head.keys, truth) for one in self.built
            ]
            curves.time_curves(found, queries, k, self.options.rounds)
            rows = [point.row() for curve in found for point in curve]
            self.result.add_table(f"{self.title}: recall@{k}", rows)
            self._summary(k, found)
            if k == GOAL_K:
                self._curve_goals(found)

    def _summary(self, k: int, found: list[list[curves.Point]]) -> None:
        rows = []
        for one, curve in zip(self.built, found, strict=True):
            row: Row = {"contender": one.contender.name, "build CPU s": one.build_cpu_s}
            for recall in RECALLS:
                bounded = "<= " if curve[0].recall > recall and len(curve) > 1 else ""
                times = curves.times_at_recall(curve, recall, or_bound=True)
                microseconds = statistics.median(times) * 1e6 if times else None
                count = curves.distances_at_recall(curve, recall, or_bound=True)
                row[f"us at {recall}"] = bounded + show(microseconds)
                row[f"distances at {recall}"] = bounded + show(count)
            row["highest recall"] = max(point.recall for point in curve)
            rows.append(row)
        self.result.add_table(f"{self.title}: cost at recall@{k}", rows)

    def _curve_goals(self, found: list[list[curves.Point]]) -> None:
        by_name = {curve[0].contender.name: curve for curve in found}
        graph, coarse = by_name.get("GraphIndex"), by_name.get("CoarseIndex")
        what = f"{self.title}, recall@{GOAL_K}"

        def faster(rival: list[curves.Point] | None, recall: float, bar: float, aim: float) -> None:
            if graph is None or rival is None:
                return
            ours = curves.times_at_recall(graph, recall, or_bound=True)
            theirs = curves.times_at_recall(rival, recall)
            value = (
                statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
                if ours and theirs
                else None
            )
            name = f"{what} {recall}: GraphIndex over {rival[0].contender.name}"
            self.result.add_goal(Goal(name, value, bar, aim))

        def distances(recall: float, bar: float, aim: float) -> None:
            if graph is not None:
                value = curves.distances_at_recall(graph, recall, or_bound=True)
                name = f"{what} {recall}: distances of GraphIndex"
                self.result.add_goal(Goal(name, value, bar, aim, lower_is_better=True, unit=""))

        if self.head.name == "rope" and self.head.num_keys >= MANY_KEYS:
            faster(coarse, GOAL_RECALL, 2, 4)
        elif self.head.name == "rope":
            faster(by_name.get("faiss IVF-Flat"), GOAL_RECALL, 4, 6)
            faster(by_name.get("faiss HNSW32"), GOAL_RECALL, 8, 15)
            faster(coarse, GOAL_RECALL, 1, 1.5)
            distances(GOAL_RECALL, 8500, 6000)
        elif self.head.name == "hubs":
            faster(coarse, 0.98, 1.3, 2)
            distances(0.98, 2500, 2500)
            distances(0.99, 2500, 2000)

    def _groups(self) -> None:
        classes = [type(contender) for contender in self.own if len(contender.efforts) > 1]
        for position, (label, head) in enumerate(self.set.groups()):
            rows = []
            for one in self._build(head, classes, f"-{label}"):
                assert isinstance(one.contender, OwnIndex)
                queries = head.queries[:, 0]
                k = min(GOAL_K, head.num_keys)
                truth = exact.top_k(queries, head.keys, k)
                swept = curves.sweep(one.contender, queries, head.keys, truth)
                efforts = _around(swept)
                mine = own_searches.group_rows(one.contender, head, k, efforts, self.options.rounds)
                rows += mine
                if one.contender.name == "GraphIndex" and position == 0 and self.has_goals:
                    name = f"{self.title}: {label} in one search over one head"
                    cost = own_searches.group_cost(mine, GOAL_RECALL)
                    self.result.add_goal(Goal(name, cost, 2.5, 1.8, lower_is_better=True))
                    self._sharing_goals(label, own_searches.sharing_row(
                        self._of(one.contender.name), one, head, k, efforts
                    ))  # fmt: skip
            if rows:
                self.result.add_table(f"{self.title}: {label}, recall@{k}", rows)

    def _of(self, name: str) -> Built:
        return next(one for one in self.built if one.contender.name == name)

    def _sharing_goals(self, label: str, row: Row) -> None:
        self.result.add_table(f"{self.title}: {label}, one index for all against one each", [row])
        name = f"{self.title}: {label}, one index each over one for all: "
        for what in ("build CPU s", "bytes"):
            ratio = row[f"{what}, one each"] / row[f"{what}, shared"]
            self.result.add_goal(Goal(f"{name}{what}", ratio, 4, 4))
        lost = 100 * (row["recall, one each"] - row["recall, shared"])
        self.result.add_goal(
            Goal(f"{name}points of recall lost", lost, 2, 1, lower_is_better=True, unit="")
        )

    def _ranges(self) -> None:
        rows = []
        for contender in self.own:
            efforts = contender.efforts if len(contender.efforts) > 1 else ()
            mine = own_searches.range_rows(
                contender, self.head, RANGE_BETA, [None, *efforts], self.options.rounds
            )
            rows += mine
            if contender.name != "GraphIndex" or not self.has_goals:
                continue
            swept = mine[1:]
            masses, scored = ([row[c] for row in swept] for c in ("mass", "keys scored"))
            name = f"{self.title}, Dipr(beta={RANGE_BETA:g}): "
            self.result.add_goal(
                Goal(f"{name}keys scored for 0.98 of the mass",
                     curves.at_recall(masses, scored, 0.98, or_bound=True), 10_000, 6_000,
                     lower_is_better=True, unit="")
            )  # fmt: skip
            self.result.add_goal(
                Goal(f"{name}mass with 10,000 keys scored",
                     curves.at_recall(scored, masses, 10_000), 0.98, 0.995, unit="")
            )  # fmt: skip
        if rows:
            note = (
                f"The best score among the first {own_searches.WINDOW_FIRST} and the last "
                f"{own_searches.WINDOW_LAST} keys is known to the search."
            )
            self.result.add_table(f"{self.title}: Dipr(beta={RANGE_BETA:g})", rows, note)

    def _prefixes(self) -> None:
        part = self.set.prefix()
        if part is None:
            return
        k = min(GOAL_K, part.prefix_len)
        queries = self.head.queries[:, 0]
        truth = exact.top_k(queries, self.head.keys, k)
        rows = []
        for contender in self.own:
            swept = curves.sweep(contender, queries, self.head.keys, truth)
            enough = [point.effort for point in swept if point.recall >= GOAL_RECALL]
            effort = enough[0] if enough else swept[-1].effort
            row = own_searches.prefix_row(
                contender, self.head, part, k, effort, self.options.rounds
            )
            rows.append(row)
            if contender.name == "GraphIndex" and self.has_goals:
                name = f"{self.title}, {part.prefix_len / part.num_keys:.0%} reused: "
                self.result.add_goal(
                    Goal(f"{name}distances over those at 100%", row["distances ratio"], 1.3, 1.15,
                         lower_is_better=True)
                )  # fmt: skip
                lost = 100 * (row["recall, whole"] - row["recall, prefix"])
                self.result.add_goal(
                    Goal(f"{name}points of recall lost", lost, 1, 0, lower_is_better=True, unit="")
                )
        if rows:
            self.result.add_table(f"{self.title}: a prefix of {part.prefix_len:,} tokens", rows)

    def _errors(self) -> None:
        tests = min(ERROR_TESTS, len(self.head.queries))
        rows = [
            row
            for contender in self.own
            for row in own_searches.error_rows(contender, self.head, ERROR_QUERIES, tests)
        ]
        if rows:
            self.result.add_table(f"{self.title}: attention error", rows)

    def _bounds(self) -> None:
        rows = [mass_bounds.bound_row(contender, self.head) for contender in self.own]
        if not rows:
            return
        self.result.add_table(f"{self.title}: bounds of the dropped mass", rows)
        checked = sum(row["queries"] for row in rows)
        violated = sum(row["bound violated"] for row in rows)
        name = f"{self.title}: bounds of the dropped mass violated, of {checked:,}"
        self.result.add_goal(Goal(name, violated, 0, 0, lower_is_better=True, unit=""))


def _around(curve: list[curves.Point]) -> list[int]:
    """The efforts from just below the goal's recall to well above it: more heads need not more."""
    first = next((i for i, p in enumerate(curve) if p.recall >= GOAL_RECALL), len(curve) - 1)
    return [point.effort for point in curve[max(0, first - 5) : first + 2]]


def head_sets(options: Namespace, sizes: Sizes) -> Iterator[HeadSet]:
    for kind in options.kinds:
        yield MadeSet(kind, sizes)
    if options.recall_tokens:
        yield from recall_sets(options.recall_tokens, sizes)
    if options.model:
        text = options.text.read_text()
        yield from model_sets(options.model, text, options.model_tokens, sizes)


def parse_options() -> Namespace:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["rope", "hubs"])
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="(all there are)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--top-k", nargs="+", type=int, default=[10, GOAL_K], metavar="K")
    parser.add_argument("--keys", type=int, default=100_000, help="(%(default)s)")
    parser.add_argument("--train", type=int, default=40_000, help="(%(default)s)")
    parser.add_argument("--tests", type=int, default=1_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="of the keys and queries (one for each kind)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep built rivals here")
    parser.add_argument(
        "--recall-tokens", type=int, metavar="N", help="also the heads of the demo's recall model"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="also the heads of this model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what the model reads")
    parser.add_argument("--model-tokens", type=int, default=4096, help="of it (%(default)s)")
    options = parser.parse_args()
    if options.model and not options.text:
        parser.error("--model is given without --text: expected a file for the model to read")
    if options.threads != 1:
        parser.error(f"--threads is {options.threads}, expected 1: searches run on one thread")
    return options


def choose_contenders(names: list[str] | None) -> list[type[Contender]]:
    """Those with these names, or all that can run here.

    Raises:
        SystemExit: there is none of that name.
    """
    there: list[type[Contender]] = [*own_contenders(), *installed_rivals()]
    if names is None:
        return there or [Reference]
    there.append(Reference)
    unknown = [name for name in names if name not in {one.name for one in there}]
    if unknown:
        raise SystemExit(
            f"--contenders: no {', '.join(unknown)}; there are "
            f"{', '.join(repr(one.name) for one in there)}, and all rivals are "
            f"{', '.join(repr(one.name) for one in RIVALS)}"
        )
    return [one for one in there if one.name in names]


def main() -> None:
    options = parse_options()
    classes = choose_contenders(options.contenders)
    result = Result.begin(__file__, __doc__, options)
    sizes = Sizes(options.keys, options.train, options.tests, options.seed)
    if options.smoke:
        sizes, options.rounds = Sizes(1000, 300, 10, options.seed), 1
    for head_set in head_sets(options, sizes):
        Study(result, options, head_set, classes).run()
    result.end(options)


if __name__ == "__main__":
    main()
