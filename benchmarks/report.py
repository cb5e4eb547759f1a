# SPDX-License-Identifier: Apache-2.0
"""The pages and the plots that show the results of all benchmarks."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.plots import plot_speedup
from benchmarks.question_plots import plot_questions
from benchmarks.questions import QUESTIONS
from benchmarks.sparse.searches.plots import plot_result
from benchmarks.support.formatting import markdown_table, show
from benchmarks.tables.plots import plot_tables

Json = dict[str, Any]

INTRODUCTION = """\
# Benchmarks

```
make bench
```

Written, as the pages that it leads to, by `python -m benchmarks.run_all` (`make bench`) from the
JSON files in `docs/benchmarks/`, never by hand. The rival of relay attention is vLLM's own
`CPU_ATTN` on the same queries, keys and values, with the instruction set that vLLM chooses here and
its own packing of the cache; the rivals of key indexes are other vector libraries and our own
scans, at the same recall. What is compared was measured in turn, round after round, in one process
(end to end: in a process each). Tables show medians, ratios are medians of the ratios of
neighbouring measurements, and "spread" is half the distance of the quartiles over the median. One
core, bfloat16 and KV blocks of 128 tokens unless a table says otherwise. No script reports times of
attention unless relay's results agree with a float64 reference first.

"of peak" is the fraction of what this core can multiply at best, measured by
`benchmarks/support/peak.cpp` just before, counting the multiplications attention needs. The
`avx512_bf16` kernel keeps the softmax weights as two bfloat16 numbers each, so that their rounding
does not show in the result: of three multiplications two count, and 0.67 of the peak is the most
it could reach. "machine allows" is the speed-up that would be left if relay ran at that ceiling, or
read every byte it needs once from memory at this core's best rate, whichever takes longer.
"""


AREAS = {
    "attention": "Attention",
    "scheduler": "Scheduler",
    "prefix_cache": "Prefix cache",
    "modules": "Prompt modules",
    "tables": "Tables",
    "cluster": "Replicas",
    "sparse": "Key indexes and sparse attention",
    "long_context": "Long contexts in vLLM",
    "page": "Live page",
}
"""A page each, by the folder of its benchmarks."""
CUDA_HEADLINE = "# On a GPU"
CUDA_COMMAND = """\
`python -m benchmarks.cuda --json docs/benchmarks/cuda.json`, on a machine with a GPU;
[cuda.md](../cuda.md) says what these numbers mean.
"""
CUDA_NOT_MEASURED = f"{CUDA_HEADLINE}\n\n{CUDA_COMMAND}\nNot yet measured.\n"


def load_results(folder: Path, names: Iterable[str]) -> list[Json]:
    """The results that there are, in this order; NAME_*.json are of NAME with other arguments, or
    of a benchmark whose longer name begins with it."""
    results = [
        (name, json.loads(path.read_text()))
        for name in names
        for path in (folder / f"{name}.json", *sorted(folder.glob(f"{name}_*.json")))
        if path.exists()
    ]
    return [result for name, result in results if result["name"] == name]


def write_pages(
    results: list[Json], page: Path, folder: Path, rooms: Mapping[str, list[str]]
) -> None:
    """Writes the index of all results, a page for each area and, with matplotlib, the plots.

    Args:
        page: the index; what it leads to is in `folder`, beside the results.
        rooms: the benchmarks of each of `AREAS`.

    Raises:
        SystemExit: there are no results.
    """
    if not results:
        raise SystemExit("there are no results: run python -m benchmarks.run_all first")
    plot_tables(results, folder)
    plot_questions(results, folder)
    below = os.path.relpath(folder, page.parent)
    areas = {area: [r for r in results if r["name"] in names] for area, names in rooms.items()}
    areas = {area: found for area, found in areas.items() if found}
    places = {r["name"]: f"{below}/{_file(area)}" for area, found in areas.items() for r in found}
    parts = [
        INTRODUCTION,
        _questions(places, below),
        _areas(areas, below, folder / "cuda.json"),
        _machine(results[0]),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts).rstrip() + "\n")
    for area, found in areas.items():
        text = _area_page(AREAS[area], found, folder)
        (folder / _file(area)).write_text(text.rstrip() + "\n")
    (folder / "cuda.md").write_text(_cuda(folder / "cuda.json").rstrip() + "\n")


def _file(area: str) -> str:
    return f"{area.replace('_', '-')}.md"


def _questions(places: Mapping[str, str], below: str) -> str:
    """Each with links to where it is answered."""
    rows = []
    for question in QUESTIONS:
        found = [
            f"[{name}]({places[name]}#{name})" for name in question.benchmarks if name in places
        ]
        plots = [f"[plot]({below}/{plot})" for plot in question.plots]
        if found:
            rows.append({"question": question.text, "answered by": ", ".join([*plots, *found])})
    return "## By question\n\n" + markdown_table(rows)


def _areas(areas: Mapping[str, list[Json]], below: str, cuda: Path) -> str:
    rows = [
        {
            "area": f"[{AREAS[area]}]({below}/{_file(area)})",
            "benchmarks": len(found),
            "goals": len(goals),
            "met": sum(goal["met"] is True for goal in goals),
        }
        for area, found in areas.items()
        for goals in [[goal for result in found for goal in result["goals"]]]
    ]
    rows.append({"area": f"[GPUs]({below}/cuda.md)", **_cuda_counts(cuda)})
    return "## By area\n\n" + markdown_table(rows)


def _area_page(title: str, results: Sequence[Json], folder: Path) -> str:
    parts = [
        f"# {title}: benchmarks\n",
        "```\npython -m benchmarks.run_all --only "
        + " ".join(dict.fromkeys(result["name"] for result in results))
        + "\n```\n",
        "What the words mean, and the machine: [benchmarks](../benchmarks.md).\n",
    ]
    plot = folder / "speedup.svg"
    if any(result["name"] == "bench_op" for result in results) and plot_speedup(results, plot):
        parts.append(
            f"![Speed-up over CPU_ATTN by batch size, beside the paper's theory]({plot.name})\n"
        )
    named: set[str] = set()
    for result in results:
        figures = plot_result(result, folder) if result["name"] == "bench_key_index" else {}
        links = {title: path.name for title, path in figures.items()}
        anchor = "" if result["name"] in named else f'<a id="{result["name"]}"></a>\n\n'
        named.add(result["name"])
        parts.append(anchor + _benchmark(result, links))
    parts.append(_goals(results))
    return "\n".join(parts)


def _cuda(path: Path) -> str:
    """The results of `benchmarks.cuda`."""
    if not path.exists():
        return CUDA_NOT_MEASURED
    from benchmarks.cuda.result import to_markdown

    lines = to_markdown(json.loads(path.read_text())).splitlines()[1:]
    return "\n".join([CUDA_HEADLINE, "", CUDA_COMMAND, *lines])


def _cuda_counts(path: Path) -> dict[str, int | None]:
    if not path.exists():
        return {"benchmarks": None, "goals": None, "met": None}
    parts = [part for part in json.loads(path.read_text())["parts"].values() if part["tables"]]
    goals = [goal for part in parts for goal in part["goals"]]
    met = sum(goal["met"] is True for goal in goals)
    return {"benchmarks": len(parts), "goals": len(goals), "met": met}


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


def _goals(results: Sequence[Json]) -> str:
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
