# SPDX-License-Identifier: Apache-2.0
"""What the predictor found out, as a table, as JSON and as a plot over cache sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_relay.prefix_cache.predict.load import OFFLINE

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.predict.predictor import Prediction

_WIDTH, _HEIGHT = 640, 400  # pixels of the plot
_UNBOUNDED_WIDTH = 1000  # columns of text
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 64, 56  # its margins
_SHORT_NAMES = {"best eviction": "best", "evictions": "evicted", "preemptions": "preempted"}


@dataclass(frozen=True)
class Scenario:
    """What a prediction is of."""

    scheduler: str
    """stock or relay."""
    arrivals: str = OFFLINE
    """offline, poisson:RATE or timestamps."""

    def __str__(self) -> str:
        return self.scheduler if self.is_online else f"{self.scheduler}, offline"

    @property
    def is_online(self) -> bool:
        return self.arrivals != OFFLINE


def predictions_table(found: Sequence[tuple[Scenario, Prediction]]) -> Table:
    """Of one cache size a row for each number, and a column for each scenario; of several, in their
    order, a row for each size and scenario, in 80 columns up to 10 digits of tokens."""
    is_online = any(scenario.is_online for scenario, _ in found)
    cells = [_cells(prediction) for _, prediction in found]
    names = [str(scenario) for scenario, _ in found]
    if len({prediction.size for _, prediction in found}) == 1:
        table = Table("", *names, show_header=is_online)
        for column in table.columns[1:]:
            column.justify = "right"
        for name in cells[0]:
            table.add_row(name, *(each[name] for each in cells))
        return table
    first = cells[0]
    table = Table(
        title=f"{first['requests']} requests, {first['prompt tokens']} prompt tokens, ceiling "
        f"{first['ceiling']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
    )
    shown = ["KV cache", "blocks", "cached tokens", "hit rate", *_SHORT_NAMES]
    if is_online:
        table.add_column("")
        shown = ["KV cache", "blocks", "hit rate", *_wait_cells(found[0][1])]
    if all(prediction.size.gib is None for _, prediction in found):
        shown.remove("KV cache")
    for name in shown:
        header = _SHORT_NAMES.get(name, name.removesuffix(" to first token"))
        table.add_column(header, justify="right")
    for name, row in zip(names, cells, strict=True):
        numbers = [row[each] for each in shown]
        table.add_row(*([name, *numbers] if is_online else numbers))
    return table


def replicas_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each cache size and rule by which replicas are chosen."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for name in rows[0]:
        is_text = isinstance(rows[0][name], str)
        table.add_column(name.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        cells = [
            each
            if isinstance(each, str)
            else f"{each:.1%}"
            if name == "hit_rate"
            else f"{each:.3g}"
            for name, each in row.items()
        ]
        table.add_row(*cells)
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is, also where the console is narrower: rich cuts numbers."""
    unbounded = console.options.update(width=_UNBOUNDED_WIDTH)
    table.width = console.measure(table, options=unbounded).maximum
    console.print(table, crop=False)


def as_dict(scenario: Scenario, prediction: Prediction) -> dict[str, Any]:
    """All numbers, for JSON."""
    counts = dict(vars(prediction))
    size, waits, by_request = map(counts.pop, ("size", "waits", "cached_tokens_by_request"))
    numbers = {
        "scheduler": scenario.scheduler,
        "arrivals": scenario.arrivals,
        "kv_cache_gib": size.gib,
        "requests": len(by_request),
        "cached_tokens": prediction.cached_tokens,
        "hit_rate": prediction.hit_rate,
        **counts,
        "cached_tokens_by_request": by_request,
    }
    if waits is not None:
        numbers |= {
            "requests_per_s": waits.requests_per_s,
            "first_token_p50_s": waits.first_token_percentile_s(50),
            "first_token_p99_s": waits.first_token_percentile_s(99),
            "longest_wait_s": waits.longest_s,
            "first_token_s_by_request": waits.first_token_s,
        }
    return numbers


def sweep_plot(predictions: Sequence[Prediction], title: str) -> str:
    """Hit rate over cache size as SVG, with the two bounds."""
    predictions = sorted(predictions, key=lambda prediction: prediction.num_blocks)
    low, high = (math.log(predictions[i].num_blocks) for i in (0, -1))
    in_gib = all(prediction.size.gib is not None for prediction in predictions)

    def x(num_blocks: int) -> float:
        share = (math.log(num_blocks) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle"),
        _text(_WIDTH / 2, _HEIGHT - 16, f"KV cache, {'GiB' if in_gib else 'blocks'}", "middle"),
    ]
    for percent in range(0, 101, 20):
        height = y(percent / 100)
        parts.append(_polyline([(_LEFT, height), (_WIDTH - _RIGHT, height)], "#ddd", "none"))
        parts.append(_text(_LEFT - 8, height + 4, f"{percent} %", "end"))
    for prediction in predictions:
        size = f"{prediction.size.gib:g}" if in_gib else f"{prediction.num_blocks:,}"
        parts.append(_text(x(prediction.num_blocks), _HEIGHT - _BOTTOM + 18, size, "middle"))
    lines: list[tuple[str, str, str, list[int | None]]] = [
        ("predicted", "#1b6ca8", "none", [p.cached_tokens for p in predictions]),
        ("best eviction", "#d95f02", "6 4", [p.belady_tokens for p in predictions]),
        ("unlimited cache", "#777", "2 3", [p.ceiling_tokens for p in predictions]),
    ]
    for index, (label, color, dashes, tokens) in enumerate(lines):
        points = [
            (x(prediction.num_blocks), y(cached / prediction.prompt_tokens))
            for prediction, cached in zip(predictions, tokens, strict=True)
            if cached is not None
        ]
        if not points:
            continue
        parts.append(_polyline(points, color, dashes))
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points
        ]
        left = _LEFT + 160 * index
        parts.append(_polyline([(left, 42), (left + 28, 42)], color, dashes))
        parts.append(_text(left + 34, 46, label, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _polyline(points: Sequence[tuple[float, float]], color: str, dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _cells(prediction: Prediction) -> dict[str, str]:
    size = prediction.size
    return {
        "KV cache": "-" if size.gib is None else f"{size.gib:g} GiB",
        "blocks": f"{prediction.num_blocks:,}",
        "block size": f"{prediction.block_size_tokens} tokens",
        "requests": f"{len(prediction.cached_tokens_by_request):,}",
        "prompt tokens": f"{prediction.prompt_tokens:,}",
        "cached tokens": f"{prediction.cached_tokens:,}",
        "hit rate": f"{prediction.hit_rate:.1%}",
        "best eviction": _share(prediction, prediction.belady_tokens),
        "ceiling": _share(prediction, prediction.ceiling_tokens),
        "evictions": f"{prediction.evicted_blocks:,}",
        "preemptions": f"{prediction.preemptions:,}",
        "steps": f"{prediction.steps:,}",
        **_wait_cells(prediction),
        "seconds": f"{prediction.elapsed_s:.1f}",
    }


def _wait_cells(prediction: Prediction) -> dict[str, str]:
    waits = prediction.waits
    if waits is None:
        return {}
    return {
        "requests/s": f"{waits.requests_per_s:,.2f}",
        "p50 to first token": _duration(waits.first_token_percentile_s(50)),
        "p99 to first token": _duration(waits.first_token_percentile_s(99)),
        "longest wait": _duration(waits.longest_s),
    }


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _share(prediction: Prediction, tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens / prediction.prompt_tokens:.1%}"
