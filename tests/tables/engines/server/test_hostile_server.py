# SPDX-License-Identifier: Apache-2.0
"""Whatever a server does, no row is lost, none is asked again, and no answer is another's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.tables.engines.server.hostile_server import HostileServer, answer_to, hostile_server
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.base import Completions, EngineError, Prompt
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.engines.server.http import RetryPolicy
from vllm_relay.tables.question import Question

AT_ONCE = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)


class Recorded(ServerEngine):
    """Of which answers were received is known."""

    def __init__(self, url: str) -> None:
        super().__init__(url, retries=AT_ONCE)
        self.received: list[str] = []

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        messages: dict[int, str] = {}

        def noted() -> Iterable[Prompt]:
            for prompt in prompts:
                messages[prompt.number] = prompt.message
                yield prompt

        for completion in super().generate(noted(), question):
            if not completion.error:
                self.received.append(messages[completion.number])
            yield completion


def table(num_rows: int) -> pa.Table:
    return pa.table({"number": [7 * row + 1_000_000 for row in range(num_rows)]})


def ask(engine: ServerEngine, num_rows: int, **options: Any) -> Any:
    return llm_map(
        table(num_rows), "Which {number}?", engine=engine, output="int", show_progress=False,
        **options,
    )  # fmt: skip


def check(server: HostileServer, result: Any, num_rows: int) -> None:
    assert result.errors == {}
    assert result.values.to_pylist() == table(num_rows)["number"].to_pylist()
    assert len(server.num_answered) == num_rows


@pytest.mark.parametrize(
    ("num_rows", "seed"),
    [(1000, 0), (1000, 1), pytest.param(10_000, 2, marks=pytest.mark.soak)],
)
def test_no_row_is_lost_repeated_or_wrong(num_rows: int, seed: int) -> None:
    with hostile_server(seed) as server:
        result = ask(ServerEngine(server.url, retries=AT_ONCE), num_rows)
        check(server, result, num_rows)
        assert set(server.num_answered.values()) == {1}
        # it did fail, and at many
        assert server.num_requests > 1.2 * num_rows


@pytest.mark.parametrize("num_rows", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_job_that_is_broken_off_goes_on(num_rows: int, tmp_path: Path) -> None:
    checkpoint = tmp_path / "answers"
    with hostile_server(3) as server:
        engine = Recorded(server.url)
        server.refuses_after = num_rows // 2
        with pytest.raises(EngineError, match="refuses every prompt.*the licence has ended"):
            ask(engine, num_rows, checkpoint=checkpoint)
        assert server.num_requests <= num_rows // 2 + 64 + 5
        received = set(engine.received)
        assert len(received) > num_rows / 4
        server.refuses_after = None
        before = server.num_answered.copy()
        check(server, ask(engine, num_rows, checkpoint=checkpoint), num_rows)
        assert not [each for each in received if server.num_answered[each] > before[each]]
        assert all(answer_to(each) in each for each in received)
