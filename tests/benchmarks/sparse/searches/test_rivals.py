# SPDX-License-Identifier: Apache-2.0
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.searches import exact
from benchmarks.sparse.searches.built import build
from benchmarks.sparse.searches.contenders import Contender, Reference
from benchmarks.sparse.searches.rivals import HOW_TO_INSTALL, RIVALS, Rival, installed_rivals

K = 10


@pytest.fixture(scope="module")
def head():
    return make_head("hubs", keys=1500, train=50, tests=20, head_size=32)


def recall_of(contender: Contender, head, effort: int) -> float:
    queries = head.queries[:, 0]
    truth = exact.top_k(queries, head.keys, K)
    found = contender.search(K, effort)(queries)
    return float(exact.recall(found, queries, head.keys, truth).mean())


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_rivals_find_what_they_should_and_can_be_kept(
    rival: type[Rival], head, tmp_path: Path
) -> None:
    if not rival.is_installed():
        pytest.skip(HOW_TO_INSTALL)
    contender = build(rival, head.keys, head.train_queries, tmp_path, "set").contender
    contender.take_distances()
    assert recall_of(contender, head, contender.efforts_for(K)[-1]) > 0.9
    distances = contender.take_distances()
    assert distances is None or 0 < distances <= 20 * len(head.keys) * 1.1
    assert contender.take_distances() in (None, 0)
    again = build(rival, head.keys, head.train_queries, tmp_path, "set").contender
    for effort in contender.efforts_for(K)[:3]:
        queries = head.queries[:, 0]
        for mine, kept in zip(
            contender.search(K, effort)(queries), again.search(K, effort)(queries), strict=True
        ):
            np.testing.assert_array_equal(mine, kept)


def test_the_oracle_is_exact(head) -> None:
    contender = Reference()
    contender.build(head.keys, head.train_queries)
    assert recall_of(contender, head, 1) == 1
    assert contender.take_distances() == 20 * 1500


class Kept(Reference):
    """Counts its builds."""

    builds = 0

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        Kept.builds += 1
        super().build(keys, train_queries)

    def save(self, path: Path) -> bool:
        np.save(path.with_suffix(".npy"), self._keys)
        return True

    def load(self, path: Path) -> bool:
        self._keys, self._distances = np.load(path.with_suffix(".npy")), 0
        return True


def test_what_was_kept_is_not_built_again(head, tmp_path: Path) -> None:
    Kept.builds = 0
    first, again = (build(Kept, head.keys, head.train_queries, tmp_path, "a set") for _ in range(2))
    assert Kept.builds == 1
    assert again.build_cpu_s == first.build_cpu_s
    assert recall_of(again.contender, head, 1) == 1
    build(Kept, head.keys, head.train_queries, tmp_path, "another set")
    build(Kept, head.keys, head.train_queries, None, "a set")
    assert Kept.builds == 3
    others = build(Kept, head.keys[::-1], head.train_queries, tmp_path, "a set")
    assert Kept.builds == 4
    assert recall_of(others.contender, dataclasses.replace(head, keys=head.keys[::-1]), 1) == 1


def test_contenders_that_cannot_be_kept_are_built_again(head, tmp_path: Path) -> None:
    for _ in range(2):
        built = build(Reference, head.keys, head.train_queries, tmp_path, "set")
        assert recall_of(built.contender, head, 1) == 1
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.sparse.searches.rivals.find_spec", lambda package: None)
    assert installed_rivals() == []
    printed = capsys.readouterr().out
    for package in ("faiss", "hnswlib", "usearch", "diskannpy", HOW_TO_INSTALL):
        assert package in printed
