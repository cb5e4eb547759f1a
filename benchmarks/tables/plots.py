# SPDX-License-Identifier: Apache-2.0
"""Plots of hit rates by order, and of the time of queries by order."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import figures
from benchmarks.support.formatting import Row

Json = dict[str, Any]

_ORDERS = {"keep": "tab:gray", "fixed": "tab:blue", "GGR": "tab:orange", "per_row": "tab:green"}
_CONTENDERS = {"keep": "tab:gray", "auto": "tab:green"}


def plot_tables(results: list[Json], folder: Path) -> None:
    """Draws what there are results for: table_orders.svg and table_queries.svg."""
    if not figures.can_draw():
        return
    by_name = {result["name"]: result["tables"][0]["rows"] for result in results}
    if rows := by_name.get("bench_tables"):
        _plot(folder / "table_orders.svg", [_hit_rates(rows)])
    if rows := by_name.get("bench_table_queries"):
        _plot(folder / "table_queries.svg", [_query_hit_rates(rows), _query_times(rows)])


Panel = tuple[str, list[str], dict[str, tuple[list[float], str]]]
"""A label, the names of groups, and for each bar of a group its values and its color."""


def _hit_rates(rows: list[Row]) -> Panel:
    bars = {name: ([row[f"{name} %"] for row in rows], color) for name, color in _ORDERS.items()}
    return "characters found in the cache, %", [row["table"] for row in rows], bars


def _query_hit_rates(rows: list[Row]) -> Panel:
    bars = {
        name: ([100 * row[f"{name}: hit rate"] for row in rows], color)
        for name, color in _CONTENDERS.items()
    }
    return "tokens found in the cache, %", [row["query"].split()[0] for row in rows], bars


def _query_times(rows: list[Row]) -> Panel:
    bars = {
        name: ([row[f"{name} s"] for row in rows], color) for name, color in _CONTENDERS.items()
    }
    return "seconds of the query", [row["query"].split()[0] for row in rows], bars


def _plot(path: Path, panels: list[Panel]) -> None:
    size = (4.5 * len(panels), 3.2)
    with figures.panels(path, ncols=len(panels), figsize=size, squeeze=False) as axes:
        for (label, groups, bars), drawn in zip(panels, axes[0], strict=True):
            places = np.arange(len(groups))
            width = 0.8 / len(bars)
            for number, (name, (values, color)) in enumerate(bars.items()):
                at = places + (number - (len(bars) - 1) / 2) * width
                drawn.bar(at, values, width, label=name, color=color)
            drawn.set_xticks(places, groups)
            drawn.set_ylabel(label)
            drawn.legend(frameon=False)
            drawn.spines[["top", "right"]].set_visible(False)
