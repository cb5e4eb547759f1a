# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict` from its options to its table, JSON and plot."""

from __future__ import annotations

import inspect
import json
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.integration.tiny_models import save_model
from vllm_relay.cli import app
from vllm_relay.demo.tokenizer import BOS_TOKEN_ID, build_tokenizer
from vllm_relay.prefix_cache import predict_run
from vllm_relay.prefix_cache.predict import CacheSize, Prediction
from vllm_relay.prefix_cache.predict_report import as_dict, sweep_plot, sweep_table
from vllm_relay.prefix_cache.predict_run import run_predict

runner = CliRunner()


def write(folder: Path, *values: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def run(path: Path, *args: Any, **options: Any) -> tuple[int, str]:
    console = Console(width=200, record=True, file=StringIO())
    status = run_predict(path, *args, console=console, **options)
    return status, console.export_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a tokenizer and a chat template."""
    folder = save_model("llama", tmp_path_factory.mktemp("model"))
    build_tokenizer(512).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    return write(tmp_path, *[{"prompt_token_ids": [*range(3, 70), 70 + i]} for i in range(4)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no cache size; give --kv-cache-space GIB, --sweep GIB,GIB,... or --blocks N,N"),
        ({"blocks": [9], "block_size": None}, "without --model, give --block-size TOKENS"),
        (
            {"kv_cache_space": 1.0, "block_size": 16},
            "without --model, give --kv-bytes-per-token BYTES (or --blocks N in place of GiB)",
        ),
        ({"blocks": [0], "block_size": 16}, "a KV cache of 0 blocks: expected more than 0"),
        (
            {"sweep": [-1.0], "block_size": 16, "kv_bytes_per_token": 8},
            "a KV cache of -1.0 GiB: expected more than 0",
        ),
        ({"blocks": [9], "scheduler": "fast"}, "--scheduler fast: expected one of stock, relay"),
        (
            {"blocks": [9], "scheduler": "relay", "eviction": "best"},
            "--eviction best: expected one of queue, lru, fifo, gdsf",
        ),
        ({"blocks": [9], "eviction": "gdsf"}, "--eviction gdsf: vLLM's own scheduler evicts by"),
        ({"blocks": [9], "arrivals": "trace"}, "--arrivals trace: expected offline; timestamps"),
        ({"blocks": [9], "json_path": Path("/nowhere/x")}, "--json /nowhere/x: cannot write"),
        ({"blocks": [9], "plot_path": Path("/nowhere/x")}, "--plot /nowhere/x: cannot write"),
        ({"blocks": [9], "model": "/nowhere"}, "--model /nowhere: no config.json there"),
        ({"sweep": [1.0, 1e6], "block_size": 32, "kv_bytes_per_token": 8}, "1e+06 GiB of KV cache"),
        (
            {"blocks": [3], "block_size": 32},
            "a KV cache of 3 blocks does not hold one request of 84 tokens (--max-model-len)",
        ),
        (
            {"blocks": [9], "block_size": 32, "max_model_len": 40},
            "line 1: the prompt has 68 tokens, expected fewer than the 40 of --max-model-len",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, ids: Path) -> None:
    status, printed = run(ids, **options)
    assert message in printed
    assert status == 1


def test_bad_input_is_refused(tmp_path: Path, model: str) -> None:
    assert "No such file" in run(tmp_path / "none.jsonl", blocks=[9], block_size=16)[1]
    text = write(tmp_path, [3], "hello")
    status, printed = run(text, blocks=[9], block_size=16)
    assert (status, "line 1: given [3]" in printed) == (1, True)
    text = write(tmp_path, "hello")
    status, printed = run(text, blocks=[9], block_size=16)
    assert (status, "line 1: given text" in printed, "--model" in printed) == (1, True, True)
    unknown = write(tmp_path, {"prompt_token_ids": [512]})
    status, printed = run(unknown, model, blocks=[40], block_size=32)
    assert (status, "vocabulary ends at 511" in printed) == (1, True)
    status, printed = run(unknown, model, blocks=[40], kv_bytes_per_token=8)
    assert (status, "--kv-bytes-per-token 8: --model says it" in printed) == (1, True)


def test_token_ids_without_a_model(ids: Path, tmp_path: Path) -> None:
    found, plot = tmp_path / "found.json", tmp_path / "plot.svg"
    status, printed = run(
        ids,
        sweep=[2**-14, 2**-13],
        blocks=[30],
        block_size=16,
        kv_bytes_per_token=512,
        json_path=found,
        plot_path=plot,
    )
    assert status == 0
    numbers = json.loads(found.read_text())
    assert [p["num_blocks"] for p in numbers["predictions"]] == [8, 16, 30]
    assert [p["kv_cache_gib"] for p in numbers["predictions"]] == [2**-14, 2**-13, None]
    last = numbers["predictions"][-1]
    assert last["cached_tokens_by_request"] == [0, 64, 64, 64]
    assert (last["requests"], last["prompt_tokens"]) == (4, 4 * 68)
    assert last["cached_tokens"] == last["ceiling_tokens"] == last["belady_tokens"] == 192
    assert "4 requests, 272 prompt tokens, ceiling 70.6%" in printed
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_hash_traces(tmp_path: Path) -> None:
    trace = [
        {"timestamp": 0, "input_length": 1000, "output_length": 30, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1300, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 700, "output_length": 3, "hash_ids": [1, 4]},
        {"timestamp": 9, "input_length": 700, "output_length": 3, "hash_ids": [2, 4]},
    ]
    found = tmp_path / "found.json"
    status, printed = run(write(tmp_path, *trace), blocks=[400], block_size=128, json_path=found)
    assert status == 0
    (prediction,) = json.loads(found.read_text())["predictions"]
    assert prediction["cached_tokens_by_request"] == [0, 896, 512, 0]
    assert "Timestamps are ignored" in printed
    for name in ("requests", "hit rate", "ceiling", "best eviction", "evictions", "preemptions"):
        assert name in printed


def test_prompts_and_chats_are_tokenized_as_vllm_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_relay.prefix_cache import predict

    seen: list[list[int]] = []

    class Spy(predict.Predictor):
        def __init__(self, settings: Any, requests: Any) -> None:
            seen.extend(request.prompt_token_ids for request in requests)
            super().__init__(settings, requests)

    monkeypatch.setattr(predict, "Predictor", Spy)
    chat = [{"role": "system", "content": "lisbon"}, {"role": "user", "content": "the old"}]
    path = write(tmp_path, "Lisbon, the old", {"messages": chat})
    status, printed = run(path, model, blocks=[40], block_size=32, dtype="float32")
    assert status == 0, printed
    tokenizer = build_tokenizer(512)
    encoded = tokenizer.encode("lisbon the old")
    assert seen[0] == encoded
    assert encoded[0] == BOS_TOKEN_ID
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert seen[1] == tokenizer.encode(text, add_special_tokens=False)


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def fake(path: Path, model: str | None, **options: Any) -> int:
        given.update(options, path=path, model=model)
        return 1

    monkeypatch.setattr(predict_run, "run_predict", fake)
    args = ["predict", "x.jsonl", "--model", "m", "--kv-cache-space", "4", "--sweep", "0.5,1"]
    args += ["--blocks", "100,200", "--scheduler", "relay", "--eviction", "gdsf"]
    args += ["--block-size", "16", "--max-num-seqs", "8", "--max-num-batched-tokens", "99"]
    args += ["--output-tokens", "5", "--arrivals", "offline", "--json", "o.json", "--plot", "o.svg"]
    assert runner.invoke(app, args).exit_code == 1
    assert given["path"] == Path("x.jsonl")
    assert (given["sweep"], given["blocks"]) == ([0.5, 1.0], [100, 200])
    assert (given["kv_cache_space"], given["eviction"]) == (4.0, "gdsf")
    assert (given["json_path"], given["plot_path"]) == (Path("o.json"), Path("o.svg"))
    assert {"path", *given} == set(inspect.signature(run_predict).parameters) - {"console"}


def test_the_command_refuses_what_is_no_list() -> None:
    result = runner.invoke(app, ["predict", "x.jsonl", "--blocks", "1,x"])
    assert result.exit_code == 2
    assert "expected numbers and commas" in result.output


def test_the_command_from_end_to_end(ids: Path) -> None:
    result = runner.invoke(app, ["predict", str(ids), "--block-size", "16", "--blocks", "20,30"])
    assert result.exit_code == 0, result.output
    assert "70.6%" in result.output


def test_reports_do_without_a_bound() -> None:
    """Of models with several kinds of KV cache Belady's bound is not known."""
    prediction = Prediction(CacheSize(blocks=9), 9, 16, 100, [0, 48], 64, None, 1, 0, 5, 0.5)
    assert as_dict(prediction)["belady_tokens"] is None
    console = Console(width=120, record=True, file=StringIO())
    console.print(sweep_table([prediction]))
    assert "48.0%" in console.export_text()
    drawing = sweep_plot([prediction], "a < b")
    assert "best eviction" not in drawing
    assert "a &lt; b" in drawing
    ElementTree.fromstring(drawing)
