# SPDX-License-Identifier: Apache-2.0
"""The process of `alternating_engine.AlternatingEngine`."""

from __future__ import annotations

import sys
import time
from typing import Any

from vllm import SamplingParams

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve


class Answering:
    """An engine, and the answers to the prompts that it was given."""

    def __init__(self, settings: EngineSettings) -> None:
        self.llm_engine = start_llm(settings).llm_engine
        self._token_ids: dict[str, list[int]] = {}
        self._num_prompts = 0

    def begin(self, prompts: list[list[int]], output_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        self._token_ids.clear()
        for prompt in prompts:
            name = str(self._num_prompts)
            self._num_prompts += 1
            self._token_ids[name] = []
            self.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

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
