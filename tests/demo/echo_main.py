# SPDX-License-Identifier: Apache-2.0
"""An engine process without a model, which answers with what it was given."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from vllm_relay.demo.engine_process import serve


def start(settings: str) -> Any:
    if settings == "broken":
        raise ValueError("no such model")
    core = SimpleNamespace(shutdown=lambda: print("the engine is shut down", flush=True))
    return SimpleNamespace(settings=settings, llm_engine=SimpleNamespace(engine_core=core))


def answer(llm: Any, *request: Any) -> Any:
    if request == ("fail",):
        raise RuntimeError("a question that cannot be answered")
    return llm.settings, *request


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
