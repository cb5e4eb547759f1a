# SPDX-License-Identifier: Apache-2.0
"""Plots of `bench_key_index`: recall against time, and error of attention against bytes read.

`python -m benchmarks.sparse.searches.plots docs/benchmarks/bench_key_index.json` writes them beside
it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support import figures
from benchmarks.support.formatting import Row

Json = dict[str, Any]

LEAST_RECALL, MOST_RECALL = 0.5, 0.9995
RECALL_TICKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
OWN_PREFIXES = ("GraphIndex", "CoarseIndex", "FlatIndex")
MARKERS = "osD^vPX<>"


def plot_result(result: Json, folder: Path) -> dict[str, Path]:
    """Draws every table of recalls and of errors that a result has.

    Returns:
        The SVG file of each table, by its title; none without matplotlib.
    """
    if not figures.can_draw():
        return {}
    written = {}
    for table in result["tables"]:
        title, rows = table["title"], table["rows"]
        path = folder / (re.sub(r"\W+", "_", title).strip("_") + ".svg")
        if re.search(r": recall@\d+$", title):
            plot_recall_against_time(rows, title, path)
        elif title.endswith(": attention error"):
            plot_error_against_bytes(rows, title, path)
        else:
            continue
        written[title] = path
    return written


def plot_recall_against_time(rows: list[Row], title: str, path: Path) -> None:
    """A curve for each contender, a level for exact ones; `rows` have contender, recall, cpu us."""
    with figures.curves(path) as axes:
        for name, line in _lines(rows):
            if len(line) == 1 and float(line[0]["recall"]) > MOST_RECALL:
                style = {**_style(name, rows), "linestyle": ":", "marker": ""}
                axes.axhline(line[0]["cpu us"], **style, label=f"{name}, exact")
                continue
            points = [(min(float(row["recall"]), MOST_RECALL), row["cpu us"]) for row in line]
            shown = [point for point in points if point[0] >= LEAST_RECALL]
            if shown:
                axes.plot(*zip(*shown, strict=True), **_style(name, rows), label=name)
        axes.set(xscale="logit", yscale="log", xlim=(LEAST_RECALL, MOST_RECALL),
                 xlabel="recall", ylabel="CPU time per query, µs", title=title)  # fmt: skip
        axes.set_xticks(RECALL_TICKS, [f"{tick:g}" for tick in RECALL_TICKS])
        _plain_numbers(axes.yaxis)


def plot_error_against_bytes(rows: list[Row], title: str, path: Path) -> None:
    """Medians as lines, the worst 1% dashed; `rows` have contender, KiB read and both errors."""
    with figures.curves(path) as axes:
        for name, line in _lines(rows):
            line = sorted(line, key=lambda row: row["KiB read"])
            read = [row["KiB read"] for row in line]
            style = _style(name, rows)
            axes.plot(read, [row["error, median"] for row in line], **style, label=name)
            faint = {**style, "linestyle": "--", "alpha": 0.5, "marker": ""}
            axes.plot(read, [row["error, p99"] for row in line], **faint)
        axes.set(xscale="log", yscale="log", xlabel="KiB read per query",
                 ylabel="relative error of the attention output", title=title)  # fmt: skip
        axes.plot([], [], "--", color="gray", alpha=0.5, label="worst 1% of the queries")
        _plain_numbers(axes.xaxis)


def _lines(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(row["contender"] for row in rows):
        yield name, [row for row in rows if row["contender"] == name]


def _style(name: str, rows: list[Row]) -> Row:
    """Our indexes stand out; a contender keeps its colour within a plot."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    number = names.index(name)
    own = name.startswith(OWN_PREFIXES)
    return {
        "color": f"C{number % 10}",
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4,
        "linewidth": 2.2 if own else 1.1,
        "linestyle": "-",
    }


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="a result of bench_key_index")
    parser.add_argument("--folder", type=Path, help="where to (next to it)")
    options = parser.parse_args()
    folder = options.folder or options.json.parent
    for path in plot_result(json.loads(options.json.read_text()), folder).values():
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
