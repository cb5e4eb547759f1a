# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from vllm_relay.tables.sql.database import TemporaryTables
from vllm_relay.tables.sql.replay.answers import Answers, Ask
from vllm_relay.tables.sql.text.edited import Edited


@dataclass(frozen=True)
class Replayed:
    """A statement that is run again and again: its text, its tables, and what is known for it."""

    tables: TemporaryTables
    edited: Edited
    answers: Answers
    ask: Ask
