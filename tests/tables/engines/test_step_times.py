# SPDX-License-Identifier: Apache-2.0
"""What prompts take, of an engine with a clock of its own."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.refusals import ended
from vllm_relay import calibrate
from vllm_relay.prefix_cache.predict.step_costs import StepCosts, fit_costs, read_costs
from vllm_relay.tables.engines import step_times
from vllm_relay.tables.engines.base import Completion, Prompt
from vllm_relay.tables.engines.step_times import sample_steps
from vllm_relay.tables.question import Question

COSTS = StepCosts(3e-3, 2e-5)
WAIT_S = 7e-4


class ClockedEngine:
    """Computes all prompts in one step, and then a token of each answer in each."""

    def __init__(self, max_model_len: int | None = None, **attributes: Any) -> None:
        self.max_model_len = max_model_len
        self.now_s = 0.0
        self.is_closed = False
        self.asked: list[list[Prompt]] = []
        self.lost_tokens = 0
        self.tokenizer = Tokenizer()
        vars(self).update(attributes)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Any:
        asked = list(prompts)
        assert question.request.body == {"ignore_eos": True, "min_tokens": question.max_tokens}
        self.asked.append(asked)
        tokens = sum(len(each.token_ids) for each in asked)
        self.now_s += WAIT_S + COSTS.seconds(tokens)
        self.now_s += (question.most_tokens - 1) * COSTS.seconds(len(asked))
        if len(self.asked) % 6 == 1:
            self.now_s += 100  # the first of each kind is slow
        for each in asked:
            yield Completion(
                each.number,
                "a",
                num_prompt_tokens=len(each.token_ids),
                num_output_tokens=question.most_tokens - self.lost_tokens,
            )

    def close(self) -> None:
        self.is_closed = True


class Tokenizer:
    all_special_ids = (0,)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<x>": 5}

    def __len__(self) -> int:
        return 9


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> ClockedEngine:
    engine = ClockedEngine()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: engine.now_s)
    return engine


@pytest.mark.parametrize("max_model_len", [None, 128, 1000])
@pytest.mark.parametrize("max_running", [1, 64])
def test_costs_are_those_of_the_engine(
    opened: Any, max_model_len: int | None, max_running: int
) -> None:
    vars(opened).update(max_model_len=max_model_len, max_running=max_running)
    parts_done: list[float] = []
    found = fit_costs(sample_steps(opened, lambda what, part: parts_done.append(part)))
    assert parts_done == sorted(parts_done) and parts_done[0] == 0 and 0.9 < parts_done[-1] < 1
    assert found.step_s == pytest.approx(COSTS.step_s, rel=1e-6)
    assert found.token_s == pytest.approx(COSTS.token_s, rel=1e-6)
    prompts = [each for asked in opened.asked for each in asked]
    assert {token for each in prompts for token in each.token_ids} == {1, 2, 3, 4, 6, 7, 8}
    assert len({tuple(each.token_ids) for each in prompts}) == len(prompts)
    longest = max(len(each.token_ids) for each in prompts)
    assert longest == min(2000, (max_model_len or 4000) - 64)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"tokenizer": None}, "give a vLLM server"),
        ({"mode": "chat"}, "give a vLLM server"),
        ({"max_model_len": 127}, "a context of 127 tokens given, expected at least 128"),
        ({"lost_tokens": 1}, "an answer of 0 tokens came, expected 1"),
    ],
)
def test_what_cannot_be_measured(opened: Any, attributes: dict[str, Any], message: str) -> None:
    vars(opened).update(attributes)
    with pytest.raises(ValueError, match=message):
        sample_steps(opened)


def run(tmp_path: Path, engine: str = "m", *arguments: str, **changes: Any) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    given = {"output_path": tmp_path / "costs.json", **changes}
    status, refusal = ended(
        lambda: calibrate.run_calibrate(engine, arguments, console=console, **given)
    )
    return status, refusal or text.getvalue()


def test_costs_are_shown_and_written(
    opened: ClockedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    def open_engine(engine: str, **options: Any) -> ClockedEngine:
        given.append((engine, options))
        return opened

    monkeypatch.setattr(calibrate, "open_engine", open_engine)
    status, text = run(tmp_path, "m", "--max-model-len", "512")
    assert (status, opened.is_closed) == (0, True), text
    assert "a step takes 3 ms, a token adds 20 us" in text
    assert read_costs(tmp_path / "costs.json").step_s == pytest.approx(3e-3)
    monkeypatch.setenv("KEY", "secret")
    assert run(tmp_path, "http://localhost:1", api_key_env="KEY")[0] == 0
    [model, (server, options)] = given
    assert model == ("m", {"max_model_len": 512})
    assert server == "http://localhost:1" and options["api_key"].value == "secret"


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("/no/such/model",), {}, "/no/such/model"),
        (("m", "n"), {}, "n given behind m"),
        (("http://localhost:1", "--max-model-len", "9"), {}, "options of an engine given"),
        (("m",), {"api_key_env": "KEY"}, "--api-key-env KEY given, which is for servers"),
        (("m", "--nosuch"), {}, "nosuch"),
        (("m",), {"output_path": Path("/no/such/folder/costs.json")}, "--output /no/such/folder"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    status, text = run(tmp_path, *arguments, **changes)
    assert status == 2 and message in text, text
    assert not list(tmp_path.iterdir())


def test_an_engine_that_fails(tmp_path: Path) -> None:
    status, text = run(tmp_path, "http://127.0.0.1:1")
    assert status == 1 and "does not answer as expected" in text, text
    assert not list(tmp_path.iterdir())
