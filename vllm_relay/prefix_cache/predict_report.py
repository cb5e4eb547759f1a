# SPDX-License-Identifier: Apache-2.0
"""What the predictor found out, as a table, as JSON and as a plot over cache sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.predict import Prediction

_WIDTH, _HEIGHT = 640, 400  # pixels of the plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 40, 56  # its margins


def prediction_table(prediction: Prediction) -> Table:
    """One cache size: a row for each number."""
    table = Table("", "", show_header=False)
    table.columns[1].justify = "right"
    for name, value in _cells(prediction).items():
        table.add_row(name, value)
    return table


def sweep_table(predictions: Sequence[Prediction]) -> Table:
    """Several cache sizes: a row for each size."""
    rows = [_cells(prediction) for prediction in predictions]
    first = rows[0]
    table = Table(
        title=f"{first['requests']} requests, {first['prompt tokens']} prompt tokens, ceiling "
        f"{first['ceiling']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    shown = {
        "KV cache": "KV cache",
        "blocks": "blocks",
        "cached tokens": "cached tokens",
        "hit rate": "hit rate",
        "best eviction": "best",
        "evictions": "evicted",
        "preemptions": "preempted",
        "steps": "steps",
        "seconds": "s",
    }
    if all(prediction.size.gib is None for prediction in predictions):
        del shown["KV cache"]
    for header in shown.values():
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """All numbers, for JSON."""
    return {
        "kv_cache_gib": prediction.size.gib,
        "num_blocks": prediction.num_blocks,
        "block_size_tokens": prediction.block_size_tokens,
        "requests": len(prediction.cached_tokens_by_request),
        "prompt_tokens": prediction.prompt_tokens,
        "cached_tokens": prediction.cached_tokens,
        "hit_rate": prediction.hit_rate,
        "ceiling_tokens": prediction.ceiling_tokens,
        "belady_tokens": prediction.belady_tokens,
        "evicted_blocks": prediction.evicted_blocks,
        "preemptions": prediction.preemptions,
        "steps": prediction.steps,
        "elapsed_s": prediction.elapsed_s,
        "cached_tokens_by_request": prediction.cached_tokens_by_request,
    }


def sweep_plot(predictions: Sequence[Prediction], title: str) -> str:
    """Hit rate over cache size as SVG, with the two bounds."""
    blocks = [prediction.num_blocks for prediction in predictions]
    low, high = math.log(min(blocks)), math.log(max(blocks))

    def x(num_blocks: int) -> float:
        share = (math.log(num_blocks) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)

    def line(label: str, tokens: Sequence[int | None], color: str, dashes: str) -> list[str]:
        points = [
            (x(p.num_blocks), y(cached / p.prompt_tokens))
            for p, cached in zip(predictions, tokens, strict=True)
            if cached is not None
        ]
        if not points:
            return []
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        legend = len(shapes)
        shapes.append(label)
        ly = _HEIGHT - _BOTTOM - 12 - 18 * legend
        return [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>',
            *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points),
            f'<line x1="{_WIDTH - 190}" x2="{_WIDTH - 162}" y1="{ly}" y2="{ly}" '
            f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>',
            f'<text x="{_WIDTH - 156}" y="{ly + 4}">{escape(label)}</text>',
        ]

    shapes: list[str] = []
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="22" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        height = y(percent / 100)
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height}" y2="{height}" '
            'stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{height + 4}" text-anchor="end">{percent} %</text>',
        ]
    for prediction in predictions:
        place, below = x(prediction.num_blocks), _HEIGHT - _BOTTOM + 18
        size = prediction.size
        label = f"{prediction.num_blocks:,}" if size.gib is None else f"{size.gib:g}"
        parts.append(f'<text x="{place:.1f}" y="{below}" text-anchor="middle">{label}</text>')
    unit = "blocks" if predictions[0].size.gib is None else "GiB"
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 16}" text-anchor="middle">KV cache, {unit}</text>'
    )
    parts += line("unlimited cache", [p.ceiling_tokens for p in predictions], "#999", "2 3")
    parts += line("best eviction", [p.belady_tokens for p in predictions], "#d95f02", "6 4")
    parts += line("predicted", [p.cached_tokens for p in predictions], "#1b6ca8", "none")
    return "\n".join([*parts, "</svg>", ""])


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
        "seconds": f"{prediction.elapsed_s:.1f}",
    }


def _share(prediction: Prediction, tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens / prediction.prompt_tokens:.1%}"
