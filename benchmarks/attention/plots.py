# SPDX-License-Identifier: Apache-2.0
"""The plot of `bench_op`: speed-up by batch size, beside the paper's theory."""

from pathlib import Path
from typing import Any

from benchmarks.support import figures

Json = dict[str, Any]


def plot_speedup(results: list[Json], path: Path) -> bool:
    """Draws the speed-up by batch size; False if there is no plot, not even an earlier one."""
    tables = [
        table
        for result in results
        for table in result["tables"]
        if table["title"].startswith("Batch size")
    ]
    if not tables or not figures.can_draw():
        return path.exists()
    rows = tables[0]["rows"]
    with figures.curves(path) as axes:
        prefixes = sorted({row["prefix"] for row in rows})
        for color, prefix in zip(("C0", "C3"), prefixes, strict=False):
            line = [row for row in rows if row["prefix"] == prefix]
            batch = [row["batch"] for row in line]
            axes.plot(batch, [row["speed-up"] for row in line], "o-", color=color,
                      label=f"measured, prefix {prefix}")  # fmt: skip
            axes.plot(batch, [row["theory"] for row in line], "--", color=color, alpha=0.6,
                      label=f"memory traffic alone (paper), prefix {prefix}")  # fmt: skip
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="requests that share the prefix",
            ylabel="speed-up of the attention op over CPU_ATTN",
            title=f"{rows[0]['heads']} heads, context {rows[0]['context']}, one core",
        )
        ticks = sorted({row["batch"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        levels = [level for level in (1, 2, 5, 10, 20, 50) if level <= axes.get_ylim()[1]]
        axes.set_yticks(levels, [str(level) for level in levels])
    return True
