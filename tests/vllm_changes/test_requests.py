# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from vllm.outputs import RequestOutput

from vllm_relay.vllm_changes.requests import carry_to_outputs


def output(**what: Any) -> RequestOutput:
    made = RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[],
        finished=False,
    )
    for name, value in what.items():
        setattr(made, name, value)
    return made


def test_what_outputs_carry_is_not_lost_where_nobody_took_the_one_before() -> None:
    carry_to_outputs("relay_missed_modules")
    first = output()
    first.add(output(relay_missed_modules=[1]), aggregate=True)
    first.add(output(), aggregate=True)
    assert vars(first)["relay_missed_modules"] == [1]
