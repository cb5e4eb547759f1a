# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from benchmarks.sparse.searches.plots import plot_result

RECALLS = [
    {"contender": name, "recall": f"{recall:.4f}", "cpu us": factor * recall / (1.001 - recall)}
    for name, factor in (("GraphIndex", 1.0), ("faiss HNSW32", 9.0))
    for recall in (0.3, 0.7, 0.9, 0.99, 1.0)
]
ERRORS = [
    {"contender": "GraphIndex, TopK", "KiB read": read, "error, median": 1 / read, "error, p99": 1}
    for read in (30.0, 10.0, 100.0)
]


def test_every_table_with_a_curve_gets_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = {
        "tables": [
            {"title": "rope, 1,000 keys: recall@10", "rows": RECALLS},
            {"title": "rope, 1,000 keys: cost at recall@10", "rows": RECALLS},
            {"title": "rope, 1,000 keys: attention error", "rows": ERRORS},
        ]
    }
    written = plot_result(result, tmp_path / "plots")
    assert {title: path.name for title, path in written.items()} == {
        "rope, 1,000 keys: recall@10": "rope_1_000_keys_recall_10.svg",
        "rope, 1,000 keys: attention error": "rope_1_000_keys_attention_error.svg",
    }
    for path in written.values():
        assert path.read_text().count("<svg") == 1
    before = [path.read_bytes() for path in written.values()]
    plot_result(result, tmp_path / "plots")
    assert [path.read_bytes() for path in written.values()] == before
