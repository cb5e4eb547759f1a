# SPDX-License-Identifier: Apache-2.0
"""Figures in SVG files, the same bytes for the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def can_draw() -> bool:
    """Whether matplotlib is there; says so if it is not."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing (pip install 'vllm-relay[dev]')")
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "relay"
    return True


@contextmanager
def panels(path: Path, **arguments: Any) -> Iterator[Any]:
    """The axes of `pyplot.subplots(**arguments)`, which are then written to the file."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**arguments)
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    finally:
        pyplot.close(figure)


@contextmanager
def curves(path: Path) -> Iterator[Any]:
    """Axes for curves, with a grid and a legend."""
    with panels(path, figsize=(7, 4.2)) as axes:
        yield axes
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
