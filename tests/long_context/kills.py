# SPDX-License-Identifier: Apache-2.0
"""Kills engines of `killed_engine` and looks at what they leave in their folder."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.long_context.killed_engine import Order, serve
from tests.support import vllm_processes
from vllm_relay.sparse.contexts.contexts_command import run_verify
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX, ContextFile
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.files.section_writer import UNFINISHED_PREFIX

MOMENTS = ("any", "starting", "indexing", "writing", "writing")
MAX_START_S, MAX_LIFE_S, MAX_WAIT_S = 4.0, 6.0, 12.0
MAX_EVENTS = 4
MAX_INDEXING_S, MAX_WRITING_S = 0.3, 0.008
POLLING_S = 0.0003
READY_TIMEOUT_S = 240.0


class Kills:
    """Engine after engine over one folder, each killed at a random moment.

    Attributes:
        stored: contexts that an engine has reported as stored, and none has begun to delete.
        deleted: contexts that were deleted when they were stored, and have not been kept again.
        counts: what was done and found.
    """

    def __init__(self, model: Path, directory: Path, seed: int) -> None:
        self.model = model
        self.folder = directory / "contexts"
        self.journals = directory / "journals"
        self.journals.mkdir()
        self.log_path = directory / "log.txt"
        self.seed = seed
        self.rng = random.Random(seed)
        self.stored: set[str] = set()
        self.deleted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._leftovers: set[str] = set()

    def kill_one(self) -> None:
        """Starts an engine, kills it, and checks the folder."""
        moment = self.rng.choice(MOMENTS)
        journal, engine = self._start(seconds=None)
        try:
            self._wait_for(moment, journal)
        finally:
            engine.kill()
        events = self._end(engine, journal, status=-signal.SIGKILL)
        self._count(moment, events)
        self._check_leftovers(events)
        self._follow(events)
        self._check_folder()

    def end_one(self, seconds: float) -> None:
        """Starts an engine that ends by itself and checks that nothing is left."""
        journal, engine = self._start(seconds)
        events = self._end(engine, journal, status=0)
        self._follow(events)
        self._check_folder()
        assert not _unfinished(self.folder)
        self.counts["removed_files"] += len(self._leftovers)
        self.counts["asked"] += dict(events)["asked"]

    def _start(self, seconds: float | None) -> tuple[Path, BaseProcess]:
        self.seed += 1
        journal = self.journals / f"{self.seed}.jsonl"
        journal.touch()
        self._leftovers = _unfinished(self.folder)
        order = Order(self.model, self.folder, journal, self.seed, sorted(self.stored), seconds)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return journal, vllm_processes.start(
            serve, order, stdout=self.log_path, stderr=self.log_path, environment=environment
        )

    def _end(self, engine: BaseProcess, journal: Path, status: int) -> list[tuple[str, Any]]:
        """What has happened to contexts, once the engine has ended with this exit status."""
        try:
            engine.join()
        finally:
            engine.kill()
        events = _events(journal)
        for kind, value in events:
            assert kind != "failed", value
        log = self.log_path.read_text(errors="replace")[-4000:]
        assert engine.exitcode == status, f"exit status {engine.exitcode}\n{log}"
        return events

    def _wait_for(self, moment: str, journal: Path) -> None:
        if moment == "starting":
            time.sleep(self.rng.uniform(0, MAX_START_S))
            return
        self._wait_until(journal, lambda: "asked" in _kinds(journal), READY_TIMEOUT_S)
        if moment == "any":
            time.sleep(self.rng.uniform(0, MAX_LIFE_S))
        elif moment == "indexing":
            wanted = _kinds(journal).count("kept") + self.rng.randint(1, MAX_EVENTS)
            self._wait_until(journal, lambda: _kinds(journal).count("kept") >= wanted, MAX_WAIT_S)
            time.sleep(self.rng.uniform(0, MAX_INDEXING_S))
        else:
            seen = self._leftovers
            for _ in range(self.rng.randint(1, MAX_EVENTS)):
                seen = seen | _unfinished(self.folder)
                self._wait_for_file(journal, seen)
            time.sleep(self.rng.uniform(0, MAX_WRITING_S))

    def _wait_for_file(self, journal: Path, seen: set[str]) -> None:
        """Until one is begun that is not among those `seen`."""
        self._wait_until(journal, lambda: bool(_unfinished(self.folder) - seen), MAX_WAIT_S)

    def _wait_until(self, journal: Path, happened: Callable[[], bool], timeout_s: float) -> None:
        """Returns also when the time is over, or the engine has failed."""
        end_s = time.monotonic() + timeout_s
        while not happened() and time.monotonic() < end_s:
            if "failed" in _kinds(journal):
                return
            time.sleep(POLLING_S)

    def _count(self, moment: str, events: list[tuple[str, Any]]) -> None:
        values = dict(events)
        self.counts["kills"] += 1
        self.counts[f"waited_for_{moment}"] += 1
        self.counts["killed_before_ready"] += "ready" not in values
        self.counts["asked"] += values.get("asked", 0)
        self.counts["engines_asked"] += "asked" in values
        unfinished = _unfinished(self.folder)
        self.counts["killed_while_writing"] += bool(unfinished - self._leftovers)
        self.counts["half_written_files"] += len(unfinished - self._leftovers)
        self.counts["removed_files"] += len(self._leftovers - unfinished)
        indexing: set[str] = set()
        for kind, value in events:
            if kind == "kept":
                indexing.add(value)
            elif kind in ("stored", "deleted"):
                indexing.discard(value)
            if kind in ("kept", "stored", "deleted"):
                self.counts[kind] += 1
        self.counts["killed_while_indexing"] += bool(indexing)

    def _check_leftovers(self, events: list[tuple[str, Any]]) -> None:
        """An engine that has written a context has removed what killed ones had begun to write."""
        kept = {value for kind, value in events if kind == "kept"}
        if any(kind == "stored" and value in kept for kind, value in events):
            left = self._leftovers & _unfinished(self.folder)
            assert not left, f"unfinished files of earlier engines: {left}"

    def _follow(self, events: list[tuple[str, Any]]) -> None:
        """Takes over what the engine has reported."""
        was_stored: set[str] = set()
        for kind, value in events:
            if kind == "stored":
                self.stored.add(value)
            elif kind == "kept":
                self.deleted.discard(value)
            elif kind in ("deleting", "evicting"):
                if value in self.stored:
                    was_stored.add(value)
                self.stored.discard(value)
            elif kind == "deleted" and value in was_stored:
                self.deleted.add(value)

    def _check_folder(self) -> None:
        """Raises AssertionError: the folder does not hold what was stored, or more than that."""
        files = {path.stem for path in self.folder.glob(f"*{CONTEXT_SUFFIX}")}
        missing, there_again = self.stored - files, self.deleted & files
        assert not missing, f"stored, and gone: {missing}"
        assert not there_again, f"deleted, and there: {there_again}"
        if not files:
            return
        output = io.StringIO()
        status = run_verify(self.folder, console=Console(file=output, soft_wrap=True))
        assert status == 0, output.getvalue()
        with ContextFile.open(self.folder / f"{min(files)}{CONTEXT_SUFFIX}") as any_context:
            fingerprint = any_context.fingerprint
        store = DiskContextStore(self.folder, fingerprint)
        assert not store.skipped
        # the name of a file is the hash of its tokens
        assert {context.id for context in store.contexts()} == files
        store.close()
        self.counts["verified"] += len(files)


def _events(journal: Path) -> list[tuple[str, Any]]:
    """Without a line that the kill has cut off."""
    lines = journal.read_text().split("\n")[:-1]
    return [(kind, value) for kind, value in map(json.loads, lines)]


def _kinds(journal: Path) -> list[str]:
    return [kind for kind, _ in _events(journal)]


def _unfinished(folder: Path) -> set[str]:
    if not folder.exists():
        return set()
    return {entry.name for entry in os.scandir(folder) if entry.name.startswith(UNFINISHED_PREFIX)}
