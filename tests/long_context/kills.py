# SPDX-License-Identifier: Apache-2.0
"""Kills engines of `kill_main` and looks at what they leave in their folder."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.integration.runs import ROOT
from vllm_relay.sparse.context_file import CONTEXT_SUFFIX, ContextFile
from vllm_relay.sparse.contexts_command import run_verify
from vllm_relay.sparse.disk_context_store import DiskContextStore
from vllm_relay.sparse.section_writer import UNFINISHED_PREFIX

MOMENTS = ("any", "starting", "indexing", "writing", "writing")
MAX_START_S, MAX_LIFE_S, MAX_WAIT_S = 4.0, 6.0, 12.0
MAX_EVENTS = 4
MAX_INDEXING_S, MAX_WRITING_S = 0.3, 0.008
POLLING_S = 0.0003
READY_TIMEOUT_S = 240.0


class Engines:
    """The process that forks engines; use as a context manager."""

    def __init__(self, model: Path, folder: Path, log_path: Path) -> None:
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.long_context.kill_main", str(model), str(folder)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_LOGGING_LEVEL": "WARNING",
                    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                },
            )

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            self._process.wait(READY_TIMEOUT_S)

    def start(self, order: dict[str, Any]) -> int:
        """The id of its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """The wait status of the last one, when it has ended."""
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log_path.read_text(errors="replace")[-4000:]
        return line


class Kills:
    """Engine after engine over one folder, each killed at a random moment.

    Attributes:
        stored: contexts that an engine has reported as stored, and none has begun to delete.
        deleted: contexts that were deleted when they were stored, and have not been kept again.
        counts: what was done and found.
    """

    def __init__(self, engines: Engines, folder: Path, journals: Path, seed: int) -> None:
        self.engines = engines
        self.folder = folder
        self.journals = journals
        self.seed = seed
        self.rng = random.Random(seed)
        self.stored: set[str] = set()
        self.deleted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._leftovers: set[str] = set()

    def kill_one(self) -> None:
        """Starts an engine, kills it, and checks the folder."""
        moment = self.rng.choice(MOMENTS)
        journal, process_id = self._start(seconds=None)
        try:
            self._wait_for(moment, journal)
        finally:
            os.kill(process_id, signal.SIGKILL)
        status = self.engines.wait()
        events = _events(journal)
        self._check_not_failed(events)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        self._count(moment, events)
        self._check_leftovers(events)
        self._follow(events)
        self._check_folder()

    def end_one(self, seconds: float) -> None:
        """Starts an engine that ends by itself and checks that nothing is left."""
        journal, _ = self._start(seconds)
        status = self.engines.wait()
        events = _events(journal)
        self._check_not_failed(events)
        assert status == 0
        self._follow(events)
        self._check_folder()
        assert not _unfinished(self.folder)
        self.counts["removed_files"] += len(self._leftovers)
        self.counts["asked"] += dict(events)["asked"]

    def _start(self, seconds: float | None) -> tuple[Path, int]:
        self.seed += 1
        journal = self.journals / f"{self.seed}.jsonl"
        journal.touch()
        self._leftovers = _unfinished(self.folder)
        order = {
            "journal": str(journal),
            "seed": self.seed,
            "stored": sorted(self.stored),
            "seconds": seconds,
        }
        return journal, self.engines.start(order)

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

    def _check_not_failed(self, events: list[tuple[str, Any]]) -> None:
        for kind, value in events:
            assert kind != "failed", value

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
