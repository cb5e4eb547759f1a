# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict` from its options to its table, JSON and plot."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.integration.tiny_models import save_model
from tests.support.refusals import ended
from vllm_relay.cli import app
from vllm_relay.cluster.predict import replica_rows
from vllm_relay.demo.tokenizer import BOS_TOKEN_ID, build_tokenizer
from vllm_relay.prefix_cache.predict import run as predict_run
from vllm_relay.prefix_cache.predict.engine import CacheSize
from vllm_relay.prefix_cache.predict.predictor import Prediction
from vllm_relay.prefix_cache.predict.report import (
    Scenario,
    as_dict,
    predictions_table,
    print_whole,
    sweep_plot,
)
from vllm_relay.prefix_cache.predict.run import run_predict

runner = CliRunner()


def write(folder: Path, *values: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def run(path: Path, *args: Any, **options: Any) -> tuple[int, str]:
    console = Console(width=200, record=True, file=StringIO())
    status, refusal = ended(lambda: run_predict(path, *args, console=console, **options))
    return status, refusal or console.export_text()


@pytest.fixture
def parts_done(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a bar is told, of predictions by one engine and by several."""
    told: list[float] = []

    @contextmanager
    def recording(what: str) -> Iterator[Callable[[str, float], None]]:
        yield lambda what, part_done: told.append(part_done)

    monkeypatch.setattr(predict_run, "showing_progress", recording)
    return told


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
        (
            {"blocks": [10**9], "block_size": 16},
            "a KV cache of 1000000000 blocks: expected at most",
        ),
        ({"blocks": [9], "scheduler": "fast"}, "--scheduler fast: expected one of stock, relay"),
        (
            {"blocks": [9], "scheduler": "relay", "eviction": "best"},
            "--eviction best: expected one of queue, lru",
        ),
        ({"blocks": [9], "eviction": "queue"}, "--eviction queue: vLLM's own scheduler evicts by"),
        (
            {"blocks": [9], "block_size": 16, "arrivals": "trace"},
            "--arrivals trace: expected offline, poisson:RATE",
        ),
        (
            {"blocks": [9], "block_size": 16, "arrivals": "poisson:x"},
            "--arrivals poisson:x: expected offline, poi",
        ),
        (
            {"blocks": [9], "block_size": 16, "arrivals": "poisson:-3"},
            "poisson:-3: expected a rate above 0, in req",
        ),
        (
            {"blocks": [9], "block_size": 16, "arrivals": "poisson:nan"},
            "poisson:nan: expected a rate above 0",
        ),
        ({"blocks": [9], "step_ms": 5.0}, "--step-ms 5: has no effect with --arrivals offline"),
        ({"blocks": [9], "token_us": 5.0}, "--token-us 5: has no effect with --arrivals offline"),
        ({"blocks": [9], "arrivals": "poisson:1", "step_ms": 0.0}, "--step-ms 0: expected more"),
        ({"blocks": [9], "arrivals": "poisson:1", "token_us": -1.0}, "--token-us -1: expected 0"),
        ({"blocks": [9], "relay": "{}"}, "--relay {}: has no effect with --scheduler stock"),
        (
            {"blocks": [9], "scheduler": "relay", "relay": "max_hold_s=5"},
            "--relay max_hold_s=5: expected a JSON object with some of fair_share_by, ",
        ),
        (
            {"blocks": [9], "scheduler": "relay", "relay": '{"eviction": "lru"}'},
            '--relay {"eviction": "lru"}: expected a JSON object with some of fair_share_by, ',
        ),
        (
            {"blocks": [9], "scheduler": "relay", "relay": '{"max_hold_s": -1}'},
            "additional_config.relay.max_hold_s",
        ),
        ({"blocks": [9], "json_path": Path("/nowhere/x")}, "--json /nowhere/x: cannot write"),
        ({"blocks": [9], "plot_path": Path("/nowhere/x")}, "--plot /nowhere/x: cannot write"),
        ({"blocks": [9], "model": "/nowhere"}, "--model /nowhere: no config.json there"),
        ({"blocks": [9], "model": "not/a/folder"}, "--model not/a/folder: no such folder"),
        (
            {"sweep": [1.0, 1e6], "block_size": 32, "kv_bytes_per_token": 8},
            "a KV cache of 1000000.0 GiB: expected",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, ids: Path) -> None:
    status, printed = run(ids, **options)
    assert message in printed
    assert status == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"blocks": [9], "block_size": 16, "arrivals": "timestamps"},
            "requests.jsonl:1: given no timestamp, expec",
        ),
        (
            {"blocks": [3], "block_size": 32},
            "a KV cache of 3 blocks does not hold one request of 84 tokens (--max-model-len)",
        ),
        (
            {"blocks": [9], "block_size": 32, "max_model_len": 40},
            "requests.jsonl:1: given a prompt of 68 tokens, expected fewer than the 40 of --max",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str, ids: Path
) -> None:
    status, printed = run(ids, **options)
    assert message in printed
    assert status == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[3], "hello"], ":1: given [3], expected a line of JSON"),
        ([{"prompt_token_ids": [5]}, "hello"], ":2: given text, expected token ids or hash ids"),
        ([], ": given no requests, expected a line of JSON"),
    ],
)
def test_bad_input_is_refused(values: list[Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, *values)
    status, printed = run(path, blocks=[9], block_size=16)
    assert status == 1
    assert printed.startswith(f"{path}{message}")


def test_input_for_another_model_is_refused(tmp_path: Path, model: str) -> None:
    path = write(tmp_path, {"prompt_token_ids": [512]})
    status, printed = run(path, model, blocks=[40], block_size=32)
    assert status == 1
    assert printed.startswith(f"{path}:1: given token id 512, expected at most 511")
    status, printed = run(path, model, blocks=[40], kv_bytes_per_token=8)
    assert (status, "--kv-bytes-per-token 8: --model says it" in printed) == (2, True)


def test_a_line_is_refused_once_for_all_sizes(ids: Path) -> None:
    status, printed = run(ids, blocks=[20, 30], block_size=16, max_model_len=40)
    assert (status, printed.count("given a prompt of 68 tokens")) == (1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", ": cannot be read (Is a directory), expected a JSON Lines file: check the path"),
        ("missing", ": cannot be read (No such file or directory), expected a JSON Lines file"),
        ("binary", ":1: given bytes that are no UTF-8 (invalid start byte at byte 2 of the line)"),
        ("empty", ": given no requests, expected a line of JSON"),
        ("bad", ":1: prompt: given 3, expected a text"),
    ],
)
def test_the_command_refuses_a_file_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x1f\x8b\x08\x00\n")
    (tmp_path / "empty").touch()
    (tmp_path / "bad").write_text('{"prompt": 3}\n')
    path = tmp_path / name
    result = runner.invoke(app, ["predict", str(path), "--block-size", "16", "--blocks", "20"])
    is_read = name in ("binary", "empty", "bad")
    assert result.exit_code == (1 if is_read else 2)
    assert result.output.startswith(f"{path}{message}" if is_read else f"error: {path}{message}")
    assert result.output.count("\n") == 1


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


@pytest.mark.parametrize(
    "line", [{"prompt_token_ids": [7] * 600}, {"hash_ids": [1, 2], "input_length": 600}]
)
def test_lines_share_with_those_of_their_salt_only(line: dict[str, Any], tmp_path: Path) -> None:
    salts = ["a", "a", "b", None]
    path = write(tmp_path, *({**line, "cache_salt": salt} for salt in salts))
    found = tmp_path / "found.json"
    status, printed = run(path, blocks=[400], block_size=128, json_path=found)
    assert status == 0, printed
    (prediction,) = json.loads(found.read_text())["predictions"]
    assert prediction["cached_tokens_by_request"] == [0, 512, 0, 0]


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


def test_a_server_is_shown_beside_stock_and_offline(tmp_path: Path) -> None:
    """Two prefixes in turn, and a cache for one: what is collected is saved."""
    lines = [
        {"prompt_token_ids": [i % 2] * 64 + [10 + i], "arrival_s": 0.01 * i} for i in range(40)
    ]
    path, found = write(tmp_path, *lines), tmp_path / "found.json"
    options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 1, "scheduler": "relay"}
    options |= {"arrivals": "timestamps", "json_path": found, "output_tokens": 1}
    status, printed = run(path, blocks=[7], step_ms=20.0, token_us=0.0, **options)
    assert status == 0, printed
    header = printed.splitlines()[1]
    assert re.split(" *[│┃] *", header)[1:-1] == ["", "relay", "stock", "relay, offline"]
    numbers = json.loads(found.read_text())
    assert (numbers["step_s"], numbers["token_s"]) == (0.02, 0.0)
    relay, stock, offline = numbers["predictions"]
    assert [relay[name] for name in ("scheduler", "arrivals")] == ["relay", "timestamps"]
    assert [offline[name] for name in ("scheduler", "arrivals")] == ["relay", "offline"]
    assert stock["cached_tokens"] < relay["cached_tokens"] <= offline["cached_tokens"]
    assert offline["cached_tokens"] == offline["ceiling_tokens"]
    # one request a step, and one more of them waits for every step
    assert stock["first_token_s_by_request"] == pytest.approx(
        [0.02 * (i + 1) - 0.01 * i for i in range(40)]
    )
    assert stock["longest_wait_s"] == pytest.approx(0.01 * 39)
    assert stock["requests_per_s"] == pytest.approx(50)
    assert offline["first_token_p50_s"] == pytest.approx(0.02 * 20.5)
    status, printed = run(path, blocks=[7, 9], **options)
    assert status == 0
    rows = [re.split(" {2,}", line)[:2] for line in printed.splitlines()[3:9]]
    names = ["relay", "stock", "relay, offline"]
    assert rows == [[name, size] for size in "79" for name in names]


def test_the_bounds_of_the_relay_scheduler_can_be_given(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [i % 2] * 64 + [10 + i]} for i in range(40)]
    path, found = write(tmp_path, *lines), tmp_path / "found.json"
    options: dict[str, Any] = {"blocks": [7], "block_size": 16, "max_num_seqs": 1}
    options |= {"scheduler": "relay", "arrivals": "poisson:1000", "json_path": found}
    cached = []
    for relay in ('{"max_hold_s": 0}', '{"max_hold_s": 1000}'):
        assert run(path, relay=relay, **options)[0] == 0
        cached.append(json.loads(found.read_text())["predictions"][0]["cached_tokens"])
    assert cached[0] < cached[1]


def test_prompts_and_chats_are_tokenized_as_vllm_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_relay.prefix_cache.predict import predictor

    seen: list[list[int]] = []

    class Spy(predictor.Predictor):
        def __init__(self, settings: Any, requests: Any) -> None:
            seen.extend(request.prompt_token_ids for request in requests)
            super().__init__(settings, requests)

    monkeypatch.setattr(predictor, "Predictor", Spy)
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
    args += ["--blocks", "100,200", "--scheduler", "relay", "--eviction", "lru"]
    args += ["--block-size", "16", "--max-num-seqs", "8", "--max-num-batched-tokens", "99"]
    args += ["--output-tokens", "5", "--arrivals", "offline", "--json", "o.json", "--plot", "o.svg"]
    args += ["--relay", "{}", "--step-ms", "3", "--token-us", "2"]
    assert runner.invoke(app, args).exit_code == 1
    assert given["path"] == Path("x.jsonl")
    assert (given["sweep"], given["blocks"]) == ([0.5, 1.0], [100, 200])
    assert (given["kv_cache_space"], given["eviction"]) == (4.0, "lru")
    assert (given["json_path"], given["plot_path"]) == (Path("o.json"), Path("o.svg"))
    assert {"path", *given} == set(inspect.signature(run_predict).parameters) - {"console"}


def test_the_command_refuses_what_is_no_list() -> None:
    result = runner.invoke(app, ["predict", "x.jsonl", "--blocks", "1,x"])
    assert result.exit_code == 2
    assert "expected numbers and commas" in result.output


@pytest.mark.parametrize("option", ["json_path", "plot_path"])
def test_the_input_is_not_overwritten(ids: Path, option: str) -> None:
    before = ids.read_text()
    options: dict[str, Any] = {"blocks": [20], "block_size": 16, option: ids}
    status, printed = run(ids, **options)
    assert status == 2
    assert "that is the input, expected another file" in printed
    assert ids.read_text() == before


def test_a_refused_run_writes_no_file(tmp_path: Path) -> None:
    status, _ = run(write(tmp_path, 7), blocks=[20], block_size=16, json_path=tmp_path / "o.json")
    assert status == 1
    assert not (tmp_path / "o.json").exists()


def test_the_command_from_end_to_end(ids: Path) -> None:
    result = runner.invoke(app, ["predict", str(ids), "--block-size", "16", "--blocks", "20,30"])
    assert result.exit_code == 0, result.output
    assert "70.6%" in result.output


def large_prediction(gib: float) -> Prediction:
    return Prediction(
        CacheSize(gib), 134_217_728, 16, 9_876_543_210, [8_765_432_109], 9_876_543_000,
        9_876_543_000, 617_283_950, 1_234_567, 98_765_432, 123_456.7,
    )  # fmt: skip


def print_in(width: int, predictions: list[Prediction]) -> str:
    console = Console(width=width, file=StringIO())
    print_whole(console, predictions_table([(Scenario("stock"), each) for each in predictions]))
    return console.file.getvalue()


NUMBERS_OF_A_SWEEP = (
    "16384 GiB", "134,217,728", "8,765,432,109", "88.8%", "100.0%", "617,283,950", "1,234,567",
)  # fmt: skip


def test_a_sweep_with_large_numbers_has_a_line_for_each_size_in_80_columns() -> None:
    printed = print_in(80, [large_prediction(0.5), large_prediction(16384)])
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.split(" {2,}", lines[-1]) == list(NUMBERS_OF_A_SWEEP)
    assert "1 requests, 9,876,543,210 prompt tokens, ceiling 100.0%" in lines[0]


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_number_is_cut_in_a_narrow_console(width: int) -> None:
    sweep = print_in(width, [large_prediction(0.5), large_prediction(16384)])
    single = print_in(width, [large_prediction(16384)])
    for number in NUMBERS_OF_A_SWEEP:
        assert number in sweep
        assert number in single
    assert "98,765,432" in single
    assert "…" not in sweep + single
    assert sweep == print_in(80, [large_prediction(0.5), large_prediction(16384)])


def test_reports_do_without_a_bound() -> None:
    """Of models with several kinds of KV cache Belady's bound is not known."""
    prediction = Prediction(CacheSize(blocks=9), 9, 16, 100, [0, 48], 64, None, 1, 0, 5, 0.5)
    assert as_dict(Scenario("stock"), prediction)["belady_tokens"] is None
    console = Console(width=120, record=True, file=StringIO())
    others = [prediction, replace(prediction, size=CacheSize(blocks=10))]
    for predictions in ([prediction], others):
        console.print(predictions_table([(Scenario("stock"), each) for each in predictions]))
        assert "48.0%" in console.export_text()
    drawing = sweep_plot([prediction], "a < b")
    assert "best eviction" not in drawing
    assert "a &lt; b" in drawing
    ElementTree.fromstring(drawing)


@pytest.mark.parametrize(("num_replicas", "rules"), [(None, None), (2, None), (2, "hash")])
def test_the_bar_goes_once_from_nothing_to_all(
    ids: Path, parts_done: list[float], num_replicas: int | None, rules: str | None
) -> None:
    rows = None if num_replicas is None else replica_rows(num_replicas, rules)
    status, text = run(ids, blocks=[9, 20], block_size=16, replica_rows=rows)
    assert status == 0, text
    assert parts_done == sorted(parts_done)
    assert 0 <= parts_done[0] < 0.5 and parts_done[-1] == 1
