# SPDX-License-Identifier: Apache-2.0
"""The process of `alternating_engine.AlternatingEngine`."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.support.decoding import add_request, exactly
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve


class Answering:
    """An engine, and the answers to the prompts that it was given."""

    def __init__(self, settings: EngineSettings) -> None:
        self.llm_engine = start_llm(settings).llm_engine
        self._token_ids: dict[str, list[int]] = {}

    def begin(self, prompts: list[list[int]], output_tokens: int) -> None:
        sampling = exactly(output_tokens)
        names = [add_request(self.llm_engine, prompt, sampling) for prompt in prompts]
        self._token_ids = {name: [] for name in names}

    def step(self) -> float | None:
        if not self.llm_engine.has_unfinished_requests():
            return None
        begin_s = time.perf_counter()
        outputs = self.llm_engine.step()
        seconds = time.perf_counter() - begin_s
        for output in outputs:
            if output.finished:
                self._token_ids[output.request_id] = list(output.outputs[0].token_ids)
        return seconds

    def end(self) -> list[list[int]]:
        return list(self._token_ids.values())


def answer(engine: Answering, *request: Any) -> Any:
    if not request:
        return engine.step()
    return engine.end() if request == ("end",) else engine.begin(*request)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Answering, answer)
