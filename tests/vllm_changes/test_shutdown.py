# SPDX-License-Identifier: Apache-2.0
"""Servers end when they are told to, whatever is open."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.support.servers import API_KEY, ask, server_process
from tests.support.waiting import WAIT_S, wait_for
from vllm_relay.wiring import end_open_requests

ENDS_WITHIN_S = 5.0
NUM_ANSWERED, NUM_OPEN = 16, 24
NUM_TRIES = int(os.environ.get("RELAY_SOAK_KILLS", "20"))
PROMPT_TOKENS = 70
HEADERS = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
SERVERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "relay": ({}, ["--attention-backend", "relay"]),
    "scheduler": ({"scheduler": True}, []),
    "relay and scheduler": ({"scheduler": True}, ["--attention-backend", "relay"]),
}


class DyingCore:
    """An engine core whose outputs do not come."""

    def __init__(self) -> None:
        self.errors: asyncio.Queue[Exception] = asyncio.Queue()
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.tell: Callable[[], None] = lambda: None

    async def get_output_async(self) -> None:
        raise await self.errors.get()

    def shutdown(self, timeout: float | None = None) -> None:
        self.tell()
        self.tell = lambda: None


@pytest.fixture
def engine() -> AsyncLLM:
    """Of an engine, what has to do with its end."""
    end_open_requests()
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.engine_core = DyingCore()
    engine.output_processor = OutputProcessor(None, log_stats=False)
    engine.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    engine.vllm_config = SimpleNamespace(shutdown_timeout=0)
    engine.logger_manager, engine.log_stats, engine.output_handler = None, False, None
    return engine


def open_request(engine: AsyncLLM, name: str) -> Coroutine[Any, Any, Any]:
    """Its next output."""
    collector = RequestOutputCollector(RequestOutputKind.DELTA, name)
    engine.output_processor.request_states[name] = SimpleNamespace(queue=collector)
    return collector.get()


@pytest.mark.parametrize("reads_it", [False, True], ids=["cancelled", "told"])
def test_what_is_open_ends_with_the_engine(engine: AsyncLLM, reads_it: bool) -> None:
    """Whether or not the output handler still reads that the engine is dead."""

    async def run() -> list[Any]:
        engine._run_output_handler()
        loop = asyncio.get_running_loop()
        call = engine.engine_core.utility_results[1] = loop.create_future()
        answered = engine.engine_core.utility_results[2] = loop.create_future()
        answered.set_result("an answer")
        requests = [open_request(engine, name) for name in "ab"]
        opened = asyncio.gather(*requests, call, answered, return_exceptions=True)
        await asyncio.sleep(0)  # now they wait
        if reads_it:

            async def tell() -> None:
                engine.engine_core.errors.put_nowait(EngineDeadError())
                await asyncio.wait([engine.output_handler], timeout=10)

            engine.engine_core.tell = lambda: asyncio.run_coroutine_threadsafe(
                tell(), loop
            ).result()
        await loop.run_in_executor(None, engine.shutdown)
        return await asyncio.wait_for(opened, 10)

    *ended, answered = asyncio.run(run())
    assert answered == "an answer"
    for error in ended:
        assert isinstance(error, EngineDeadError)
        assert create_error_response(error).error.code == 503
        assert "shutting down" in str(error)
    assert len({id(error) for error in ended}) == 3  # tracebacks grow with each who raises one


@pytest.mark.parametrize("shutdown_timeout", [0, 9])
def test_requests_may_finish_where_there_is_time(engine: AsyncLLM, shutdown_timeout: int) -> None:
    engine.vllm_config.shutdown_timeout = shutdown_timeout

    async def run() -> Any:
        engine._run_output_handler()
        request = asyncio.create_task(open_request(engine, "a"))
        await asyncio.sleep(0)
        queue = engine.output_processor.request_states["a"].queue
        loop = asyncio.get_running_loop()

        async def finish() -> None:
            queue.put("an answer")
            await asyncio.sleep(0)

        engine.engine_core.tell = lambda: asyncio.run_coroutine_threadsafe(finish(), loop).result()
        await loop.run_in_executor(None, engine.shutdown)
        return await asyncio.wait_for(request, 10)

    if shutdown_timeout:
        assert asyncio.run(run()) == "an answer"
    else:
        with pytest.raises(EngineDeadError, match="shutting down"):
            asyncio.run(run())


def test_what_a_crash_tells_stays(engine: AsyncLLM) -> None:
    async def run() -> None:
        engine._run_output_handler()
        engine.engine_core.errors.put_nowait(ValueError("no such output"))
        await asyncio.wait_for(open_request(engine, "a"), 10)

    with pytest.raises(ValueError, match="no such output"):
        asyncio.run(run())


def test_engines_without_a_loop_shut_down(engine: AsyncLLM) -> None:
    """Those that never ran, and those that are collected after their loop."""
    engine.shutdown()

    async def run() -> None:
        engine._run_output_handler()

    asyncio.run(run())
    engine.shutdown()


def test_a_server_that_ends_looks_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have just ended."""
    monkeypatch.setattr(launcher, "find_process_using_port", lambda port: 1 / 0)
    end_open_requests()
    assert launcher.find_process_using_port(80) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_relay.demo.tokenizer import build_tokenizer

    directory = save_model("llama", tmp_path_factory.mktemp("model"))
    build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(directory)
    return directory


def completion(address: str, number: int, max_tokens: int, *, streams: bool) -> str:
    """What a client gets."""
    prompt = [9] * (PROMPT_TOKENS - 20) + [number + 3] * 20
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=2 * WAIT_S)
    try:
        text = json.dumps(body | {"stream": streams})
        connection.request("POST", "/v1/completions", text, HEADERS)
        response = connection.getresponse()
        page = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return "waited" if isinstance(error, TimeoutError) else "closed"
    finally:
        connection.close()
    if '"finish_reason":"length"' in page:
        return "answered"
    return "error" if '"code":503' in page else "cut"


def half_a_request(address: str) -> socket.socket:
    """A client that never sends the rest."""
    host, port = urlsplit(address).netloc.split(":")
    client = socket.create_connection((host, int(port)), timeout=WAIT_S)
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Length: 100"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    client.sendall("\r\n".join([*lines, "", '{"model": ']).encode())
    return client


def wait_for_requests(address: str) -> None:
    """Until most of those that are to be open are."""

    def most_are() -> bool:
        _, page = ask("GET", f"{address}/metrics")
        counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.M)
        return sum(map(float, counts)) > NUM_OPEN / 2

    wait_for(most_are)


def seconds_to_end(
    model: Path, log: Path, kind: str, number: signal.Signals, *, from_a_terminal: bool
) -> float:
    """Of a server with open requests after a signal; checks what its clients get, and that nothing
    is left of it.

    Args:
        from_a_terminal: to all its processes, and not to the first alone.
    """
    relay, options = SERVERS[kind]
    options = [*options, "--max-num-seqs", "2"]
    with server_process(model, log, relay, options) as (process, address):
        assert process.pid is not None
        with ThreadPoolExecutor(NUM_OPEN) as clients:
            answers = [
                clients.submit(completion, address, row, 2, streams=row % 2 == 0)
                for row in range(NUM_ANSWERED)
            ]
            assert {each.result() for each in answers} == {"answered"}
            max_tokens = MAX_MODEL_LEN_TOKENS - PROMPT_TOKENS
            opened = [
                clients.submit(completion, address, row, max_tokens, streams=row % 2 == 0)
                for row in range(NUM_OPEN)
            ]
            half = half_a_request(address)
            wait_for_requests(address)
            below = psutil.Process(process.pid).children(recursive=True)
            assert below
            at_s = time.monotonic()
            if from_a_terminal:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)
            process.join(WAIT_S)
            seconds = time.monotonic() - at_s
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"it has not ended after {seconds:.0f} s")
            assert process.exitcode == 0
            _, alive = psutil.wait_procs(below, timeout=WAIT_S)
            assert alive == []
            ends = Counter(each.result() for each in opened)
        with half, contextlib.suppress(ConnectionResetError):
            assert b" 200 OK" not in half.recv(1000)
    assert ends["waited"] == 0, ends
    assert ends["answered"] < NUM_OPEN / 2, ends
    return seconds


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "number", "from_a_terminal"),
    [
        ("relay and scheduler", signal.SIGINT, True),
        ("relay", signal.SIGTERM, False),
    ],
    ids=["ctrl-c", "terminated"],
)
def test_a_server_with_open_requests_ends(
    model: Path, tmp_path: Path, kind: str, number: signal.Signals, from_a_terminal: bool
) -> None:
    seconds_to_end(model, tmp_path / "log", kind, number, from_a_terminal=from_a_terminal)


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
@pytest.mark.parametrize("kind", SERVERS)
def test_servers_end_each_time(
    model: Path, tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    seconds = [
        seconds_to_end(
            model, tmp_path / f"log-{run}", kind, number, from_a_terminal=number == signal.SIGINT
        )
        for run in range(NUM_TRIES)
    ]
    print(f"{kind}: seconds to end: {', '.join(f'{each:.2f}' for each in sorted(seconds))}")
    assert max(seconds) < ENDS_WITHIN_S
