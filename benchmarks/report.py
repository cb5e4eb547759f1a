# SPDX-License-Identifier: Apache-2.0
"""The page and the plot that show the results of all benchmarks."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.attention.plots import plot_speedup
from benchmarks.sparse.searches.plots import plot_result
from benchmarks.support.formatting import markdown_table, show
from benchmarks.tables.plots import plot_tables

Json = dict[str, Any]

INTRODUCTION = """\
# Benchmarks

```
make bench
```

Written by `python -m benchmarks.run_all` (`make bench`) from the JSON files in `docs/benchmarks/`,
never by hand. The rival of relay attention is vLLM's own `CPU_ATTN` on the same queries, keys and
values, with the instruction set that vLLM chooses here and its own packing of the cache; the
rivals of key indexes are other vector libraries and our own scans, at the same recall. What is
compared was measured in turn, round after round, in one process (end to end: in a process each).
Tables show medians, ratios are medians of the ratios of neighbouring measurements, and "spread" is
half the distance of the quartiles over the median. One core, bfloat16 and KV blocks of 128 tokens
unless a table says otherwise. No script reports times of attention unless relay's results agree
with a float64 reference first.

"of peak" is the fraction of what this core can multiply at best, measured by
`benchmarks/support/peak.cpp` just before, counting the multiplications attention needs. The
`avx512_bf16` kernel keeps the softmax weights as two bfloat16 numbers each, so that their rounding
does not show in the result: of three multiplications two count, and 0.67 of the peak is the most
it could reach. "machine allows" is the speed-up that would be left if relay ran at that ceiling, or
read every byte it needs once from memory at this core's best rate, whichever takes longer.
"""


CUDA_HEADLINE = "## The Triton kernels on a GPU"
CUDA_NOT_MEASURED = f"""\
{CUDA_HEADLINE}

`python -m benchmarks.cuda --json docs/benchmarks/cuda.json`, on a machine with a GPU
([cuda.md](cuda.md), section 8). **Not yet measured**: no GPU was at hand. The bars, for an H200 in
bfloat16 with the L2 cache flushed:

| what | measured | bar | aim |
| --- | --- | ---: | ---: |
| 120 batches: (limit + 6 us) / time, geometric mean | not yet | >= 0.45 | 0.65 |
| limit / time where memory binds and the limit is over 100 us | not yet | >= 0.70 | 0.85 |
| TFLOP/s where multiplying binds | not yet | >= 350 | 500 |
| 20 trees x 4 kinds of heads: speed-up over the best unshared kernel | not yet | >= 3 | 5 |
| 8 requests, prefix 4,000, 8 query heads on 1 KV head: us | not yet | <= 20 | 12 |
| 500 random batches: time over the best unshared kernel, p99 | not yet | <= 1.05 | 1.03 |
| planning 1,024 requests of 2,048 blocks: us, without waiting | not yet | <= 50 | 20 |
| replayed graphs that differ from eager runs | not yet | 0 | |
| largest error over FlashAttention 3's | not yet | <= 1 | |
| Llama-3-8B geometry, batch 128, prefix 8,192: tokens/s over stock | not yet | >= 2.5 | 4 |
| the same without sharing | not yet | >= 0.98 | |
"""


def load_results(folder: Path, names: Iterable[str]) -> list[Json]:
    """The results that there are, in this order; NAME_*.json are of NAME with other arguments."""
    paths = (
        path
        for name in names
        for path in (folder / f"{name}.json", *sorted(folder.glob(f"{name}_*.json")))
    )
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def write_page(results: list[Json], page: Path, plot_folder: Path) -> None:
    """Writes the page and, with matplotlib, the plot it shows.

    Raises:
        SystemExit: there are no results.
    """
    if not results:
        raise SystemExit("there are no results: run python -m benchmarks.run_all first")
    parts = [INTRODUCTION, _machine(results[0]), _goals(results)]
    plot = plot_folder / "speedup.svg"
    if plot_speedup(results, plot):
        parts.append(
            "![Speed-up over CPU_ATTN by batch size, beside the paper's theory]"
            f"({os.path.relpath(plot, page.parent)})\n"
        )
    for result in results:
        figures = plot_result(result, plot_folder) if result["name"] == "bench_key_index" else {}
        links = {title: os.path.relpath(path, page.parent) for title, path in figures.items()}
        parts.append(_benchmark(result, links))
    plot_tables(results, plot_folder)
    parts.append(_cuda(plot_folder / "cuda.json"))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts).rstrip() + "\n")


def _cuda(path: Path) -> str:
    """The results of `benchmarks.cuda`, as a section of the page."""
    if not path.exists():
        return CUDA_NOT_MEASURED
    from benchmarks.cuda.result import to_markdown

    lines = to_markdown(json.loads(path.read_text())).splitlines()
    lines = [f"#{line}" if line.startswith("#") else line for line in lines]
    return "\n".join([CUDA_HEADLINE, *lines[1:]])


def _machine(result: Json) -> str:
    machine, peak = result["machine"], result["peak"]
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    lines = [
        "## Machine\n",
        f"- {machine['cpu']} (family / model {machine['cpu_family_model']}), {machine['cpus']} "
        f"CPUs, {machine['memory_gib']} GiB; {', '.join(machine['cpu_flags'])}",
        f"- caches: {caches}",
        f"- vLLM {machine['vllm']}, torch {machine['torch']}, Python {machine['python']}; "
        f"vllm-relay {machine['vllm_relay']}, kernel `{machine['relay_kernels'][0]}`",
    ]
    if peak:
        rates = [
            f"{rate:.0f} GFLOP/s {_flops_name(name)}"
            for name, rate in peak.items()
            if name.endswith("_gflops")
        ]
        reads = [
            f"{rate:.0f} GB/s from {_size_name(name)}"
            for name, rate in peak.items()
            if name.startswith("read_")
        ]
        lines.append(f"- one core at best: {', '.join(rates)}; reads {', '.join(reads)}")
    return "\n".join(lines) + "\n"


def _flops_name(name: str) -> str:
    return name.removesuffix("_gflops").replace("_", " ")


def _size_name(name: str) -> str:
    size, unit = name.removeprefix("read_").removesuffix("_gb_per_s").split("_")
    return f"{size} {unit.capitalize().replace('ib', 'iB')}"


def _goals(results: list[Json]) -> str:
    goals = [goal for result in results for goal in result["goals"]]
    if not goals:
        return ""
    rows = [
        {
            "what": goal["what"],
            "measured": goal["value"],
            "bar": f"{'<=' if goal['lower_is_better'] else '>='} {show(goal['bar'])}",
            "aim": goal["aim"],
            "met": {True: "yes", False: "**no**", None: "-"}[goal["met"]],
        }
        for goal in goals
    ]
    return (
        "## Goals\n\n"
        "Those of attention were set for machines with AMX, which multiplies several times faster\n"
        "than this one may.\n\n" + markdown_table(rows)
    )


def _benchmark(result: Json, figures: dict[str, str]) -> str:
    """A section; `figures` are shown in place of the tables of these titles."""
    headline, _, rest = result["description"].partition("\n")
    peak = _peak_line(result)
    parts = [f"## {headline.rstrip('.')}\n", f"`{result['command']}`{peak}\n", rest.strip() + "\n"]
    for table in result["tables"]:
        if figure := figures.get(table["title"]):
            parts.append(f"![{table['title']}]({figure})\n")
            continue
        parts.append(f"**{table['title']}**\n")
        parts.append(markdown_table(table["rows"]))
        if table["note"]:
            parts.append(table["note"] + "\n")
    return "\n".join(parts)


def _peak_line(result: Json) -> str:
    peak = result["peak"]
    rates = {name: rate for name, rate in peak.items() if name.endswith("gflops")}
    if not rates:
        return ""
    best = max(rates, key=rates.__getitem__)
    return (
        f" (just before: {rates[best]:.0f} GFLOP/s {_flops_name(best)}, "
        f"{peak['read_256_mib_gb_per_s']:.0f} GB/s from memory on {peak['threads']} "
        f"core{'s' if peak['threads'] > 1 else ''}; load {result['machine']['load_before']})"
    )
