# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

from rich.console import Console

from vllm_relay.demo.engine import RoundResult
from vllm_relay.demo.report import Comparison, compare, comparison_table
from vllm_relay.demo.requests import Request

REQUESTS = [Request([1, 2], [7, 8, 9]), Request([1, 3], [4, 5, 6])]
RIGHT = [[[7, 8, 9]], [[4, 5, 6]]]


def rounds(token_ids: list[list[list[int]]], seconds: float, **counters: int) -> list[RoundResult]:
    named = {name.replace("__", ":"): value for name, value in counters.items()}
    return [RoundResult(ids, seconds, named) for ids in token_ids]


def judge(stock: list[list[list[int]]], relay: list[list[list[int]]]) -> Comparison:
    return compare(
        REQUESTS,
        rounds(stock, 2.0, vllm__prefix_cache_queries=10, vllm__prefix_cache_hits=9),
        rounds(relay, 0.5, relay__kv_tokens_logical=100, relay__kv_tokens_read=20),
    )


def printed(comparison: Comparison) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
    return capture.get()


def test_right_and_identical_is_a_success() -> None:
    comparison = judge(RIGHT, RIGHT)
    assert comparison.problems() == []
    assert comparison.speedup == 4.0
    assert comparison.stock.prefix_cache_hit_rate == 0.9
    assert comparison.relay.prefix_cache_hit_rate is None
    assert comparison.stock.kv_tokens_read == comparison.stock.kv_tokens_logical == 200
    assert comparison.relay.kv_tokens_read == 40
    assert comparison.relay.output_tokens_per_s == 6.0
    assert "2 / 2" in printed(comparison)
    assert json.loads(json.dumps(comparison.as_dict()))["passed"]


def test_a_wrong_answer_is_a_problem() -> None:
    comparison = judge(RIGHT, [[[7, 8, 9]], [[4, 0, 6]]])
    assert comparison.relay.answers_right == 1
    assert comparison.relay.recited_tokens_right == 5
    assert len(comparison.problems()) == 2
    assert "relay answered 1 of 2 questions wrong" in comparison.problems()


def test_a_difference_after_the_answer_is_a_problem() -> None:
    comparison = judge(RIGHT, [[[7, 8, 0]], [[4, 5, 6]]])
    assert comparison.relay.answers_right == 2
    assert comparison.problems() == ["1 of 2 outputs of relay differ from stock vLLM's"]


def test_wrong_but_identical_is_a_problem() -> None:
    wrong = [[[0, 0, 0]], [[4, 5, 6]]]
    assert len(judge(wrong, wrong).problems()) == 2


def test_without_ground_truth_differences_are_only_counted() -> None:
    requests = [Request([1]), Request([2])]
    comparison = compare(requests, rounds([[[1], [2]]], 1.0), rounds([[[1], [3]]], 1.0))
    assert comparison.identical_outputs == 1
    assert comparison.problems() == []
    assert "answers right" not in printed(comparison)
    assert "unknown" in printed(comparison)
