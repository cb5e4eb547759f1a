# SPDX-License-Identifier: Apache-2.0
"""Modular prompts in a real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.modules.engine_main import NUM_AT_ONCE
from tests.support.servers import ask, serving
from tests.support.vllm_processes import run_module

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from vllm_relay.demo.tokenizer import build_tokenizer

    found = {}
    for kind in ("llama", "qwen3"):
        found[kind] = save_model(kind, tmp_path_factory.mktemp(kind))
        build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(found[kind])
    return found


def run(main: str, *arguments: str, output: Path, multiprocessing: bool = False) -> dict[str, Any]:
    done = run_module(
        f"tests.modules.{main}",
        [*arguments, str(output)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(("kind", "mode"), [("llama", "modular"), ("qwen3", "repair")])
def test_logits_are_those_of_hugging_face(
    models: dict[str, Path], tmp_path: Path, kind: str, mode: str
) -> None:
    """With the same positions and a mask that shows each token what it may see."""
    seen = run("logits_main", str(models[kind]), mode, "10", output=tmp_path / "seen.json")
    assert seen["prompts"] >= 45 and seen["segments"] > 100
    assert seen["worst"] < 1e-4
    assert seen["cached"] == seen["stored"]


def test_requests_with_modules(models: dict[str, Path], tmp_path: Path) -> None:
    """The engine core in a process of its own."""
    seen = run(
        "engine_main",
        str(models["llama"]),
        output=tmp_path / "seen.json",
        multiprocessing=True,
    )
    # five segments: what every prompt has, two modules, and one in each
    assert seen["encodings_at_once"] == 5
    assert seen["hits_at_once"] == 5 * NUM_AT_ONCE
    assert seen["encoded_bytes"] == 7 * 32 * 2 * 2 * 2 * 32 * 4
    assert seen["at_once"] == [seen["alone"]] * NUM_AT_ONCE
    assert seen["cached"] == [seen["cached"][0]] * 3
    # nothing of a module lies where a prompt without modules would find it
    assert seen["plain_after"] == seen["plain_before"] != seen["alone"]
    assert seen["plain_cached"] == 0
    assert seen["together"] == seen["one_by_one"]
    assert seen["preemptions"] > 0 and seen["evicted"] > 10
    assert seen["repaired"][0] == seen["repaired"][1]
    assert seen["samples"] == [seen["alone"]] * 3
    assert seen["salted"] == [seen["alone"]] * 2
    assert seen["encodings_of_a_salt"] == 5
    assert seen["mixed"] == [seen["plain_before"], seen["alone"], seen["plain_before"]]
    assert seen["reset"]
    assert seen["after_reset"] == seen["after_abort"] == seen["at_last"] == seen["alone"]
    assert seen["pin"] == seen["to_pin"]
    assert seen["encodings_of_pinned"] == 0
    assert seen["exact"] == seen["written_out"]
    for error, expected in zip(
        seen["errors"],
        ["prompt_logprobs", "blocks of 64 tokens", "no tail", "relay_modules", "max_tokens is 500",
         "positions up to", "a plan for"],
        strict=True,
    ):  # fmt: skip
        assert expected in error


SCHEMA = """<schema name="trip">
  <system>river amber</system>
  <user>
    stone <module name="plan">harbor <param name="days" len="3"/> castle
      <union><module name="sea">river river river</module><module name="city">stone</module></union>
    </module>
    <module name="hotel">amber amber amber amber</module>
  </user>
</schema>"""


def test_server(models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "known.xml"
    path.write_text(SCHEMA.replace('"trip"', '"known"'))
    relay = {"scheduler": True, "schemas": [str(path)]}
    options = [
        "--attention-backend",
        "relay",
        "--block-size",
        "32",
        "--enable-prompt-tokens-details",
    ]
    with serving(models["llama"], tmp_path / "log", relay, options) as server:
        schemas = f"{server}/relay/schemas"
        assert ask("GET", schemas, key="wrong")[0] == 401
        assert ask("GET", schemas) == (200, '{"schemas":["known"]}')
        status, page = ask("POST", schemas, SCHEMA)
        assert status == 201
        layout = {each["module"]: each for each in json.loads(page)["modules"]}
        assert list(layout) == ["", "plan", "plan/sea", "plan/city", "hotel"]
        assert (layout["plan"]["tokens"], layout["plan"]["parameters"]) == (5, {"days": 3})
        assert ask("GET", f"{schemas}/trip") == (200, page)
        status, page = ask("POST", schemas, "<schema name='x'><modul/></schema>")
        assert status == 400 and "schema:1:18: found <modul>" in page
        status, page = ask(
            "POST", schemas, "<schema name='x'><module name='a' src='/etc/hosts'/></schema>"
        )
        assert status == 400 and "not read from a file" in page

        prompt = '<plan days="stone river"><sea/></plan><hotel/> river'
        asked = {"model": "tiny", "max_tokens": 5, "temperature": 0, "ignore_eos": True,
                 "relay": {"schema": "trip", "prompt": prompt}}  # fmt: skip
        status, page = ask("POST", f"{server}/v1/completions", asked)
        assert status == 200, page
        completion = json.loads(page)
        cached = {"": 6, "plan": 2, "plan/sea": 3, "hotel": 4}
        computed = dict.fromkeys(cached, 0)  # for this request
        assert completion["usage"]["relay"] == {"cached_tokens_by_module": computed}
        assert "relay_missed" not in page
        assert completion["usage"]["prompt_tokens"] == 6 + 2 + 3 + 4 + 2 + 1
        assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 + 2 + 3 + 4
        status, page = ask("POST", f"{server}/v1/chat/completions", asked)
        assert status == 200, page
        chat = json.loads(page)
        text = completion["choices"][0]["text"]
        assert chat["choices"][0]["message"]["content"].split() == text.split()
        assert chat["usage"]["relay"] == {"cached_tokens_by_module": cached}
        for url in ("completions", "chat/completions"):
            streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            status, page = ask("POST", f"{server}/v1/{url}", streamed)
            *_, last, done = page.split("\n\n")[:-1]
            assert (status, done) == (200, "data: [DONE]")
            usage = json.loads(last.removeprefix("data: "))["usage"]
            assert usage["relay"] == chat["usage"]["relay"]
            assert usage["prompt_tokens"] == completion["usage"]["prompt_tokens"]

        other = {**streamed, "relay": {"schema": "trip", "prompt": "<plan><city/></plan> river"}}
        status, page = ask("POST", f"{server}/v1/completions", other)
        usage = json.loads(page.split("\n\n")[-3].removeprefix("data: "))["usage"]
        found = {"": 6, "plan": 2, "plan/city": 0}
        assert usage["relay"] == {"cached_tokens_by_module": found}
        for changed, expected in (
            ({"relay": {"schema": "trip", "prompt": "<hotal/> river"}}, "did you mean hotel"),
            ({"relay": {"prompt": "<hotel/> river"}}, "expected the name of a schema"),
            ({"relay": {"schema": "trip", "prompt": "river", "mode": "fast"}}, "relay.mode"),
            ({"relay": "trip"}, "relay: "),
            ({"prompt": "river"}, "prompt: given beside relay"),
            (
                {"vllm_xargs": {"relay_modules": "x"}, "relay": None, "prompt": "river"},
                "relay_modules",
            ),
        ):
            status, page = ask("POST", f"{server}/v1/completions", {**asked, **changed})
            assert status == 400 and expected in page, page
        pin = {"id": "trip", "relay": {"schema": "trip", "prompt": "<hotel/>"}}
        status, page = ask("POST", f"{server}/relay/pins", pin)
        pinned = json.loads(page)
        assert status == 201 and pinned["resident"] and pinned["blocks"] == 2, page
        assert pinned["tokens"] == 6 + 4
        assert ask("DELETE", f"{server}/relay/pins/trip")[0] == 204
        assert ask("DELETE", f"{schemas}/trip")[0] == 204
        assert ask("DELETE", f"{schemas}/trip")[0] == 404
        status, page = ask("POST", f"{server}/v1/completions", asked)
        assert status == 400 and "unknown schema 'trip'; known: known" in page
        metrics = ask("GET", f"{server}/metrics")[1]
        assert 'relay:module_encodings_total{engine="0",model_name="tiny"} 5.0' in metrics
        assert 'relay:module_hits_total{engine="0",model_name="tiny"} 21.0' in metrics


def test_repair_finds_what_straddles_two_modules(tmp_path: Path) -> None:
    seen = run("recall_main", output=tmp_path / "seen.json")
    assert seen["exact"] == seen["expected"]
    assert seen["repair"] == seen["expected"]
    assert seen["modular"] != seen["expected"]  # or this test would show nothing
