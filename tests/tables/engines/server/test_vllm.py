# SPDX-License-Identifier: Apache-2.0
"""Prompts that a real vLLM server answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.support.servers import API_KEY, ask, serving
from tests.tables.engines.server.test_engine import WordTokenizer
from tests.tables.images.pictures import picture
from vllm_relay.prefix_cache.predict.step_costs import fit_costs
from vllm_relay.tables.engines import step_times
from vllm_relay.tables.engines.base import EngineError, Prompt
from vllm_relay.tables.engines.server.engine import Mode, ServerEngine
from vllm_relay.tables.images import ImageStore, image_fields
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

pytestmark = pytest.mark.integration

BLOCK_SIZE_TOKENS = 32
CHOICES = ("river", "stone")
QUESTION = Question("Which?", ("place",), Output(choices=CHOICES), max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_relay.demo.tokenizer import build_tokenizer

    directory = save_model("llama", tmp_path_factory.mktemp("model"))
    build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--block-size", str(BLOCK_SIZE_TOKENS), "--num-gpu-blocks-override", "48"]
    options += ["--enable-prompt-tokens-details"]
    with serving(model, log, {}, options) as address:
        yield address


def test_choices(server: str, model: Path) -> None:
    engine = ServerEngine(server, api_key=API_KEY, max_running=1)
    assert (engine.mode, engine.identity) == ("completions", f"tiny [{model}] completions")
    assert engine.max_model_len == MAX_MODEL_LEN_TOKENS
    assert engine.cache == BlockCache(BLOCK_SIZE_TOKENS, 47)
    # tokens that no text has: the first of a text is always 1
    token_ids = [[9] * 100 + [10 + row % 3] * 50 for row in range(6)]
    prompts = [Prompt(row, "", tokens) for row, tokens in enumerate(token_ids)]
    completions = list(engine.generate(prompts, QUESTION))
    assert [each.number for each in completions] == list(range(6))
    assert not any(each.error for each in completions)
    assert {each.text.strip() for each in completions} <= set(CHOICES)
    assert [each.text for each in completions[:3]] == [each.text for each in completions[3:]]
    assert [each.num_prompt_tokens for each in completions] == [150] * 6
    planned = cached_tokens(TokenSequences.from_lists(token_ids), engine.cache)
    assert [each.num_cached_tokens for each in completions] == planned.tolist()
    assert sum(planned) > 0


def test_its_steps_are_measured(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "ROUNDS", 1)
    engine = ServerEngine(server, api_key=API_KEY, max_running=4)
    samples = step_times.sample_steps(engine)
    assert [each.steps for each in samples] == [1, 1, 64, 64]
    costs = fit_costs(samples)
    assert costs.step_s + costs.token_s > 0


@pytest.mark.parametrize("mode", ["completions", "chat"])
def test_probabilities_of_the_first_token(server: str, mode: Mode) -> None:
    engine = ServerEngine(server, api_key=API_KEY, mode=mode)
    prompts = [Prompt(row, f"river {row}", [9 + row] * 30) for row in range(6)]
    completions = list(engine.generate_scored(prompts, QUESTION))
    assert [each.error for each in completions] == [""] * 6
    for each in completions:
        assert each.first_logprobs is not None
        likeliest, logprob = max(each.first_logprobs.items(), key=lambda one: one[1])
        assert logprob <= 0
        assert likeliest.strip() == each.text.strip()
    plain = next(engine.generate(iter(prompts), QUESTION))
    assert plain.first_logprobs is None


def test_many_at_once_and_one_that_is_too_long(server: str) -> None:
    engine = ServerEngine(server + "/v1", "tiny", api_key=API_KEY, max_running=8)
    prompts = [Prompt(row, "", [9] * (600 if row == 7 else 20 + row)) for row in range(40)]
    completions = {each.number: each for each in engine.generate(prompts, QUESTION)}
    assert [number for number, each in completions.items() if each.error] == [7]
    assert "HTTP 400" in completions[7].error
    assert all(completions[row].num_prompt_tokens == 20 + row for row in range(40) if row != 7)


def test_an_answer_that_is_cut(server: str) -> None:
    engine = ServerEngine(server, api_key=API_KEY, mode="chat")
    assert engine.tokenizer is None
    question = Question("?", ("place",), max_tokens=2)
    [completion] = engine.generate([Prompt(0, "river stone", [])], question)
    assert (completion.is_cut, completion.num_output_tokens, completion.error) == (True, 2, "")


def metric(server: str, pattern: str) -> int:
    """The sum of the samples whose name and labels match."""
    status, page = ask("GET", f"{server}/metrics")
    assert status == 200
    samples = re.findall(rf"^vllm:{pattern} (\S+)$", page, re.MULTILINE)
    assert samples
    return sum(int(float(sample)) for sample in samples)


def test_closing_aborts_requests_in_the_server(server: str) -> None:
    """The first is refused while the others run; these are never answered."""
    engine = ServerEngine(server, api_key=API_KEY, max_running=4)
    finished = r'request_success_total\{.*"(?:stop|length)".*\}'
    num_before = metric(server, finished)
    prompts = [Prompt(row, "", [9] * (8 if row else 600)) for row in range(5)]
    completions = engine.generate(iter(prompts), Question("?", ("place",), max_tokens=500))
    assert next(completions).error
    completions.close()
    num_asked = 0
    while num_asked == 0 or metric(server, r"num_requests_running\{.*\}"):
        [completion] = engine.generate([Prompt(0, "", [9] * 8)], QUESTION)
        assert not completion.error
        num_asked += 1
    assert metric(server, finished) == num_before + num_asked


def test_the_tokenizer_of_another_model(server: str) -> None:
    with pytest.raises(ValueError, match="other tokens than the server's model 'tiny'"):
        ServerEngine(server, api_key=API_KEY, tokenizer=WordTokenizer())


def test_a_wrong_key(server: str) -> None:
    with pytest.raises(EngineError, match="lets nobody in with this api_key: HTTP 401"):
        ServerEngine(server, api_key="wrong")


def test_a_model_without_images_says_so(server: str) -> None:
    with ExitStack() as cleanup:
        store = ImageStore()
        cleanup.callback(store.close)
        question = Question("?", ("photo",), images=image_fields(["photo"], store))
        message = f'"photo": "{store.reference("bytes", picture(1))}"'
        engine = ServerEngine(server, api_key=API_KEY)
        with pytest.raises(EngineError, match="takes no images .*multimodal"):
            list(engine.generate([Prompt(0, message, [9, 10])], question))
