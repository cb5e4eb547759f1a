# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine, decoded greedily, and how long its steps take."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams

_NUMBERS = itertools.count()


def exactly(num_tokens: int, **others: Any) -> SamplingParams:
    """So many tokens, the most likely ones; `others` are parameters of sampling, too."""
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **others
    )


def add_request(llm_engine: Any, token_ids: list[int], sampling: SamplingParams) -> str:
    """Returns the request's name, which no other of this process has."""
    name = str(next(_NUMBERS))
    llm_engine.add_request(name, {"prompt_token_ids": token_ids}, sampling)
    return name


def decode_steps_s(
    llm_engine: Any, names: list[str], steps: int, at_first: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds between the arrivals of the results of steps that decoded all these requests.

    The requests end with it.

    Args:
        names: of all requests of the engine. They start one after the other: give them some more
            tokens than steps.
        at_first: called after the first step that decoded them all.
    """
    arrivals_s: list[float] = []
    while llm_engine.has_unfinished_requests() and len(arrivals_s) <= steps:
        outputs = llm_engine.step()
        if len(outputs) == len(names):
            arrivals_s.append(time.perf_counter())
            if len(arrivals_s) == 1:
                at_first()
        elif outputs and arrivals_s:
            break
    llm_engine.abort_request(names)
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    return [after - before for before, after in zip(arrivals_s, arrivals_s[1:], strict=False)]
