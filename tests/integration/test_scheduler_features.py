# SPDX-License-Identifier: Apache-2.0
"""RelayScheduler against vLLM's own where vLLM pops requests that it cannot run yet, and gives them
back: LoRA adapters that do not fit, and grammars that are not compiled."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions

pytestmark = pytest.mark.integration

SCENARIOS = ("lora", "structured", "reset")
ADAPTERS = ("none", "first", "second")
SHARED_TOKENS = 128  # full blocks of a family's prefix
CHUNKS = {"long_prefill_token_threshold": 48, "max_num_batched_tokens": 192}


@pytest.fixture(scope="module")
def stock(run: Run) -> dict[str, Any]:
    return run("cpu_attn", driver="features_main", scenarios=SCENARIOS, **CHUNKS)


@pytest.fixture(scope="module")
def relay(run: Run) -> dict[str, Any]:
    """Prefixes come chunk by chunk: siblings are held."""
    config = {"relay": {"scheduler": True}}
    return run(
        "cpu_attn",
        driver="features_main",
        scenarios=SCENARIOS,
        additional_config=config,
        **CHUNKS,
    )


def assert_equal_runs(relay: dict[str, Any], stock: dict[str, Any]) -> None:
    for scenario in ("lora", "structured"):
        assert_same_completions(relay[scenario]["finished"], stock[scenario]["finished"])
        assert relay[scenario]["queue_records"] == 0
        assert stock[scenario]["most"]["deferred"] > 0
        assert relay[scenario]["most"]["deferred"] > 0
    assert relay["reset"] is True


def assert_each_prefix_computed_once(finished: dict[str, Any]) -> None:
    """Of each family; an aborted request may have computed it."""
    families: dict[str, list[int]] = {}
    for name, output in finished.items():
        family, _, member = name.rpartition("-")
        if member.isdigit():
            families.setdefault(family, []).append(output["cached_tokens"])
    assert len(families) > 1
    for family, cached_tokens in families.items():
        assert sorted(cached_tokens)[1:] == [SHARED_TOKENS] * (len(cached_tokens) - 1), family


def test_outputs_are_those_of_vllms_scheduler(relay: dict[str, Any], stock: dict[str, Any]) -> None:
    assert_equal_runs(relay, stock)


def test_adapters_do_not_share(relay: dict[str, Any]) -> None:
    finished = relay["lora"]["finished"]
    for member in ("0-0", "1-2"):
        outputs = {tuple(finished[f"{name}-{member}"]["token_ids"]) for name in ADAPTERS}
        assert len(outputs) == len(ADAPTERS)
    # the same prompt, once per adapter
    assert [finished[f"{name}-alone"]["cached_tokens"] for name in ADAPTERS] == [0, 0, 0]
    assert_each_prefix_computed_once(finished)
    assert relay["lora"]["most"]["held"] > 0


def test_grammars_are_obeyed(relay: dict[str, Any]) -> None:
    structured = relay["structured"]
    finished = structured["finished"]
    texts: dict[str, set[str]] = {"choice": set(), "regex": set(), "json": set()}
    for name, output in finished.items():
        if name == "broken":
            assert output["finish_reason"] == "error"
            continue
        if output["grammar"] is None:
            assert output["finish_reason"] == "length"
            continue
        [(kind, grammar)] = output["grammar"].items()
        text = output["text"]
        assert output["finish_reason"] == "stop"
        if kind == "choice":
            assert text in grammar
        elif kind == "regex":
            assert re.fullmatch(grammar, text)
        else:
            value = json.loads(text)
            assert value.keys() == {"colour", "sizes", "new"}
            assert value["colour"] in ("red", "blue") and value["new"] in (True, False)
            assert 2 <= len(value["sizes"]) <= 3 and set(value["sizes"]) <= {1, 2, 3}
        texts[kind].add(text)
    assert all(len(each) > 1 for each in texts.values())  # the model chose, not the grammar
    assert structured["most"]["deferred"] == structured["num_grammars"]
    assert "broken" in finished and "aborted" not in finished
    assert_each_prefix_computed_once(finished)
    assert structured["most"]["held"] > 0


def test_with_a_bound_on_overtaking_and_relay_attention(run: Run, stock: dict[str, Any]) -> None:
    """As in a server, and with other steps; requests that are given back are the oldest again."""
    config = {"relay": {"scheduler": True, "max_overtakes": 1}}
    relay = run(
        "relay",
        driver="features_main",
        scenarios=SCENARIOS,
        additional_config=config,
        usage_context="OPENAI_API_SERVER",
    )
    assert_equal_runs(relay, stock)


def test_long_contexts(run: Run, stock: dict[str, Any]) -> None:
    """All of the prompts are long ones."""
    window = {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40, "alpha": 0}
    relay = run(
        "relay_sparse",
        driver="features_main",
        scenarios=SCENARIOS,
        additional_config={"relay": {"scheduler": True, **window}},
    )
    assert_equal_runs(relay, stock)
