# SPDX-License-Identifier: Apache-2.0
"""One plot for each question that docs/when-it-pays.md begins with."""

from pathlib import Path
from typing import Any

from benchmarks.support import figures
from benchmarks.support.formatting import Row

Json = dict[str, Any]

_STOCK, _RELAY = "tab:gray", "tab:green"
_SHARES, _ALONE = "tab:green", "tab:olive"
_SIZE = (9, 3.4)


def plot_questions(results: list[Json], folder: Path) -> None:
    """Draws what there are results for: pays_attention, pays_scheduler and pays_sparse, in SVG."""
    if not figures.can_draw():
        return
    tables = {
        (result["name"], table["title"].split(",")[0]): table["rows"]
        for result in reversed(results)
        for table in result["tables"]
    }
    lengths = tables.get(("bench_op", "Prefix length (Figure 5 of the paper)"))
    batches = tables.get(("bench_op", "Batch size"))
    if lengths and batches:
        _plot_attention(lengths, batches, folder / "pays_attention.svg")
    loads = tables.get(("bench_online", "1024 requests under 64 prefixes"))
    servers = tables.get(("bench_serve", "192 prompts"))
    if loads and servers:
        _plot_scheduler(loads, servers, folder / "pays_scheduler.svg")
    decodes = [
        row
        for result in results
        if result["name"] == "bench_long_context_decode"
        for table in result["tables"]
        if table["title"].startswith("Attention of a decode step")
        for row in table["rows"]
        if row["relay_sparse with"] == "defaults"
    ]
    if decodes:
        _plot_sparse(decodes, folder / "pays_sparse.svg")


def _plot_attention(lengths: list[Row], batches: list[Row], path: Path) -> None:
    """Times as fast as stock attention, with sharing and without."""
    longest = max(row["prefix"] for row in batches)
    panels = (
        ("prefix", f"tokens that {lengths[0]['batch']} requests share", lengths),
        (
            "batch",
            f"requests that share {longest:,} tokens",
            [row for row in batches if row["prefix"] == longest],
        ),
    )
    with figures.panels(path, ncols=2, figsize=_SIZE, sharey=True) as both:
        for axes, (column, label, rows) in zip(both, panels, strict=True):
            at = [row[column] for row in rows]
            for name, color, shown in (
                ("speed-up", _SHARES, "shared tokens read once"),
                ("without sharing", _ALONE, "each request for itself"),
            ):
                axes.plot(at, [row[name] for row in rows], "o-", color=color, label=shown)
            axes.axhline(1, color=_STOCK, linestyle="--", label="stock attention")
            axes.set(xscale="log", xlabel=label, ylim=(0, None))
            axes.set_xticks(at, [f"{each:,}" for each in at], fontsize=7)
            axes.minorticks_off()
        both[0].set_ylabel("attention, times as fast")
        both[1].legend(frameon=False, fontsize=8)


def _plot_scheduler(loads: list[Row], servers: list[Row], path: Path) -> None:
    """Waits by load, simulated; tokens per second of a real server with each switch."""
    with figures.panels(path, ncols=2, figsize=_SIZE) as (waits, rates):
        for scheduler, color in (("stock", _STOCK), ("relay", _RELAY)):
            line = [row for row in loads if row["scheduler"] == scheduler]
            waits.plot(
                [row["load"] for row in line],
                [row["first token p99 ms"] / 1e3 for row in line],
                "o-",
                color=color,
                label=f"{scheduler} scheduler",
            )
        waits.set(xlabel="load, by what stock serves (simulated)", ylim=(0, None))
        waits.set_ylabel("p99 to the first token, s")
        waits.legend(frameon=False, fontsize=8)
        names = [row["server"] for row in servers]
        colors = [_STOCK if name == "stock" else _RELAY for name in names]
        rates.bar(names, [row["output tokens per s"] for row in servers], color=colors)
        rates.set_ylabel("output tokens per second")
        rates.set_xlabel("a real server that is behind")
        rates.tick_params(axis="x", labelsize=8)


def _plot_sparse(rows: list[Row], path: Path) -> None:
    rows = sorted(rows, key=lambda row: row["context tokens"])
    at = [row["context tokens"] for row in rows]
    with figures.curves(path) as axes:
        axes.plot(at, [row["dense ms"] for row in rows], "o-", color=_STOCK, label="dense")
        axes.plot(at, [row["sparse ms"] for row in rows], "o-", color=_RELAY, label="relay_sparse")
        axes.set(xscale="log", yscale="log", xlabel="tokens of a stored context",
                 ylabel="attention of a decode step, ms")  # fmt: skip
        axes.set_xticks(at, [f"{each:,}" for each in at])
        axes.minorticks_off()
