# SPDX-License-Identifier: Apache-2.0
"""Answers kept in a file, by question, fields, model and parameters."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_relay.tables.engines.base import Completion
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.prompts.modules.layout import ModuleMode
from vllm_relay.tables.question import Question

_APPLICATION_ID = 0x52454C59
_VERSION = 1
_KEYS_PER_QUERY = 500
_LOCK_TIMEOUT_S = 60.0


class CheckpointError(ValueError):
    """A file that cannot be a checkpoint."""


@dataclass(frozen=True)
class KnownAnswer:
    """
    Attributes:
        text: of the answer.
        num_prompt_tokens, num_output_tokens: that it took.
        is_cut: whether it ended at the engine's `max_answer_tokens`.
    """

    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    is_cut: bool


class Checkpoint:
    """An SQLite database. Each answer is there for good when `keep` returns, also if the process is
    killed after that. Several processes may use a file at once.

    Args:
        path: of the file, made if it is not there; None keeps answers until `close`, in memory and
            beyond 2 MB in a temporary file.

    Raises:
        CheckpointError: it cannot be read or written, or is something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(
                path or "", isolation_level=None, timeout=_LOCK_TIMEOUT_S, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        try:
            self._open()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise self._unusable(error) from None
            raise

    def known(self, keys: Sequence[bytes]) -> dict[bytes, KnownAnswer]:
        """The answers of those keys that have one.

        Raises:
            CheckpointError: the file is damaged.
        """
        found: dict[bytes, KnownAnswer] = {}
        try:
            for begin in range(0, len(keys), _KEYS_PER_QUERY):
                part = keys[begin : begin + _KEYS_PER_QUERY]
                rows = self._db.execute(
                    "SELECT key, text, prompt_tokens, output_tokens, is_cut FROM answers "
                    f"WHERE key IN ({','.join('?' * len(part))})",
                    part,
                )
                for key, text, prompt_tokens, output_tokens, is_cut in rows:
                    found[key] = KnownAnswer(text, prompt_tokens, output_tokens, bool(is_cut))
        except sqlite3.Error as error:
            raise CheckpointError(
                f"checkpoint {self.path}: {error}: give another file, or a copy of this one"
            ) from error
        return found

    def keep(self, key: bytes, completion: Completion) -> None:
        """An answer, unless it is an error.

        Raises:
            CheckpointError: it cannot be written, as on a full disk.
        """
        if completion.error:
            return
        row = (
            key,
            completion.text,
            completion.num_prompt_tokens,
            completion.num_output_tokens,
            completion.is_cut,
        )
        try:
            self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise CheckpointError(f"checkpoint {self.path}: {error}") from error

    def close(self) -> None:
        self._db.close()

    def _open(self) -> None:
        db = self._db
        # one process makes the table, the others wait for it
        db.execute("BEGIN IMMEDIATE")
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application_id != _APPLICATION_ID:
            raise sqlite3.DatabaseError("the database is another program's")
        if tables and version != _VERSION:
            raise sqlite3.DatabaseError(
                f"it has version {version}, this program reads version {_VERSION}"
            )
        if not tables:
            db.execute(
                "CREATE TABLE answers (key BLOB PRIMARY KEY, text TEXT NOT NULL, "
                "prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, "
                "is_cut INTEGER NOT NULL) WITHOUT ROWID"
            )
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")
        # a commit survives a killed process; the last ones may not survive a power failure
        db.execute("PRAGMA synchronous = NORMAL")
        self._use_write_ahead_log()

    def _use_write_ahead_log(self) -> None:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                # this does not wait for other processes by itself
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)

    def _unusable(self, error: sqlite3.Error) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.path}: {error}; expected a file made by an earlier job, or a new "
            f"file in a folder that can be written to"
        )


class Keys:
    """Keys of the rows of a question: of what is asked, of whom, not of the order of the fields.

    Args:
        question: that is asked, as it was given: what its answers may have by default is no part of
            it.
        order_is_kept: whether the order of fields is the caller's; answers to prompts in that order
            are kept apart.
        modules: how modules are used: answers with modules are kept apart, by mode.
    """

    def __init__(
        self,
        identity: str,
        question: Question,
        template: PromptTemplate,
        order_is_kept: bool,
        modules: ModuleMode = "off",
    ) -> None:
        # references among the values say which images there are
        told = {**asdict(replace(question, images=None)), "max_tokens": question.most_tokens}
        del told["request"], told["images"], told["output"]["check"]
        if request := question.request.as_json():
            told["request"] = request
        asked = [identity, told, asdict(template), order_is_kept]
        if modules != "off":
            asked.append(modules)
        self._start = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16)

    def of(self, values: Sequence[str]) -> bytes:
        """
        Args:
            values: JSON, of each of the question's fields.

        Returns:
            16 bytes.
        """
        state = self._start.copy()
        state.update("\n".join(values).encode("utf-8", "surrogatepass"))
        return state.digest()
