# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed by SIGKILL leave a folder of contexts from which the next ones go on.

Run with `-m soak`; RELAY_SOAK_KILLS is the least number of kills, 200 in a full run (about half an
hour). More follow while too few of them came when there was something to lose.

What is killed is a process with a whole vLLM engine that answers, keeps, reuses, deletes and evicts
contexts (`soak.Soak`): scheduler, worker and index threads are in it. Each is a fork of a process
that has imported vLLM and has not computed anything, which spares it the imports; all else of the
start-up is done anew every time. One of five is killed at a random moment before or shortly after
it is ready; one up to 6 s after it has asked about all contexts that it has found; one up to 0.3 s
after a request has become a context (its first to fourth), whose index is built then; and two of
five up to 8 ms after a file was begun (the first to fourth). The counts say in how many of them an
index was being built, and in how many a file was half written.

After each kill the folder must hold each context that was reported as stored, and none that was
deleted when it was stored (one that is deleted while its index is built may still appear, if the
kill comes between); all files are verified in full. The next engine must know all of them, and
answer a question about each, and has removed what was half written when it has stored a context
itself. The last engine ends by itself; then nothing unfinished may be left.

The machine goes on, so this says nothing about what is lost when it stops.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.long_context.kills import Kills
from tests.long_context.soak import FIRST_SEED
from vllm_relay.demo.recall_model import build_recall_model

pytestmark = pytest.mark.soak

NUM_KILLS = int(os.environ.get("RELAY_SOAK_KILLS", "8"))
LAST_ENGINE_S = 5.0


def enough(counts: Counter[str]) -> bool:
    """Whether kills came when there was something to lose, on a machine however busy."""
    return (
        all(counts[name] >= NUM_KILLS / 4 for name in ("kept", "stored", "asked", "verified"))
        and counts["killed_while_indexing"] > NUM_KILLS / 8
        and counts["killed_while_writing"] > NUM_KILLS / 20
    )


def test_contexts_outlive_the_engine_that_stored_them(tmp_path: Path) -> None:
    model = build_recall_model(tmp_path / "model", max_position_embeddings=2048)
    kills = Kills(model, tmp_path, FIRST_SEED)
    for number in range(4 * NUM_KILLS):
        if number >= NUM_KILLS and enough(kills.counts):
            break
        kills.kill_one()
    kills.end_one(LAST_ENGINE_S)
    counts = kills.counts
    print(dict(counts))
    assert enough(counts)
    assert counts["removed_files"] == counts["half_written_files"]
