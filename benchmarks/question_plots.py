# SPDX-License-Identifier: Apache-2.0
"""One plot for each question that docs/when-it-pays.md begins with."""

from pathlib import Path
from typing import Any

from benchmarks.support import figures
from benchmarks.support.formatting import Row

Json = dict[str, Any]

_STOCK, _RELAY = "tab:gray", "tab:green"
_SHARES, _ALONE = "tab:green", "tab:olive"
_NOT_ESTIMATED = ", nothing estimated"
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
        if table["title"] == "Attention of a decode step, all layers"
        for row in table["rows"]
    ]
    english = [
        table["rows"]
        for result in results
        if result["name"] == "bench_long_context_english"
        for table in result["tables"]
    ]
    if decodes and english:
        _plot_sparse(decodes, english[0], folder / "pays_sparse.svg")


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


def _plot_sparse(decodes: list[Row], english: list[Row], path: Path) -> None:
    """Times by length of the context and setting; what is read, and how far answers are off."""
    bars: dict[str, dict[int, float]] = {"dense": {}}
    for row in decodes:
        bars["dense"][row["context tokens"]] = row["dense ms"]
        bars.setdefault(row["relay_sparse with"], {})[row["context tokens"]] = row["sparse ms"]
    lengths = sorted(bars["dense"])
    width = 0.8 / len(bars)
    with figures.panels(path, ncols=2, figsize=_SIZE) as (times, quality):
        for number, ((name, found), color) in enumerate(
            zip(bars.items(), (_STOCK, _SHARES, _ALONE), strict=False)
        ):
            at = [lengths.index(length) + (number - 1) * width for length in found]
            shown = times.bar(at, list(found.values()), width, color=color, label=name)
            times.bar_label(shown, fmt="%.3g", fontsize=7)
        times.set_xticks(range(len(lengths)), [f"{length:,} tokens" for length in lengths])
        times.set_ylabel("attention of a decode step, ms")
        times.legend(frameon=False, fontsize=8)
        for suffix, color, label in (
            ("", _SHARES, "the unread estimated"),
            (_NOT_ESTIMATED, _ALONE, "nothing estimated"),
        ):
            line = [row for row in english if _is_estimated(row) is (suffix == "")]
            line = sorted((row for row in line if row["read"] < 1), key=lambda row: row["read"])
            at = [100 * row["read"] for row in line]
            off = [row["mean difference of log-probabilities"] for row in line]
            quality.plot(at, off, "o-", color=color, label=label)
            for place, row in zip(zip(at, off, strict=True), line, strict=True):
                name = row["RELAY_SPARSE with"].removesuffix(suffix)
                quality.annotate(name, place, (5, 5), textcoords="offset points", fontsize=7)
        quality.margins(0.15)
        quality.set(xlabel="tokens read, %", xlim=(0, None), ylim=(0, None))
        quality.legend(frameon=False, fontsize=8)
        quality.set_ylabel("log-probabilities, mean difference")


def _is_estimated(row: Row) -> bool:
    return not row["RELAY_SPARSE with"].endswith(_NOT_ESTIMATED)
