# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    VLLM_MODEL,
    chat_answer,
    fake_server,
)
from vllm_relay.tables.engines.base import Prompt
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question


def test_only_vllm_is_asked_for_probabilities() -> None:
    question = Question("?", ("a",), Output("bool"))
    for model, is_asked in ((VLLM_MODEL, True), (OTHER_MODEL, False)):
        with fake_server(lambda body: chat_answer("true"), model) as server:
            engine = ServerEngine(server.url, mode="chat")
            [completion] = engine.generate_scored([Prompt(0, "q", [])], question)
            assert (completion.text, completion.first_logprobs) == ("true", None)
            assert ("logprobs" in server.bodies[-1]) == is_asked
