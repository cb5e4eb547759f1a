# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM in processes of their own."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support import vllm_processes
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S

API_KEY = "secret"


@contextmanager
def serving(
    model: Path,
    log: Path,
    relay: dict[str, Any],
    options: Sequence[str] = (),
    *,
    spawns: bool = False,
) -> Iterator[str]:
    """The address of a server of "tiny" that answers.

    Args:
        relay: its options under additional_config.relay.
        options: for `vllm serve`.
        spawns: as in `vllm_processes.start`.
    """
    with server_process(model, log, relay, options, spawns=spawns) as (_, address):
        yield address


@contextmanager
def server_process(
    model: Path,
    log: Path,
    relay: dict[str, Any],
    options: Sequence[str] = (),
    *,
    spawns: bool = False,
    main: str = "vllm.entrypoints.cli.main",
) -> Iterator[tuple[BaseProcess, str]]:
    """As `serving`, with the server's process, which leads a session.

    Args:
        main: the module that is run, with the arguments of vLLM's.
    """
    port = free_port()
    command = ["serve", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--api-key", API_KEY, "--dtype", "float32", "--enforce-eager"]
    command += ["--additional-config", json.dumps({"relay": relay}), *options]
    process = vllm_processes.start(
        vllm_processes.run_main_in_session,
        main,
        *command,
        stdout=log,
        stderr=log,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
        spawns=spawns,
    )
    try:
        deadline_s = time.monotonic() + WAIT_S
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health"):
                    break
            except OSError:
                alive = process.is_alive() and time.monotonic() < deadline_s
                assert alive, log.read_text()[-4000:]
                time.sleep(0.1)
        yield process, address
    finally:
        process.terminate()
        process.join(WAIT_S)
        ended = process.exitcode is not None
        process.kill()
        assert ended, "the server did not end when it was asked to"


@contextmanager
def forest_events(address: str, key: str = API_KEY) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of the live page with texts: their kinds and data."""
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{address}/relay/forest/events?texts=1"

    def events(answer: Any) -> Iterator[tuple[str, Any]]:
        kind, deadline_s = "", time.monotonic() + WAIT_S
        for line in answer:
            assert time.monotonic() < deadline_s, "what is waited for is not told"
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=WAIT_S
    ) as got:
        yield events(got)


def ask(
    method: str, url: str, body: Any = None, key: str = API_KEY, headers: Any = None
) -> tuple[int, str]:
    """Status and page.

    Args:
        body: a text, bytes, or what becomes JSON.
        headers: more of them.
    """
    if body is not None and not isinstance(body, str | bytes):
        body = json.dumps(body)
    data = body.encode() if isinstance(body, str) else body
    known = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, {**known, **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
