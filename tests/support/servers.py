# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

API_KEY = "secret"

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(
    model: Path, log: Path, relay: dict[str, Any], options: Sequence[str] = ()
) -> Iterator[str]:
    """The address of a server of "tiny" that answers.

    Args:
        relay: its options under additional_config.relay.
        options: for `vllm serve`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--api-key", API_KEY, "--dtype", "float32", "--enforce-eager"]
    command += ["--additional-config", json.dumps({"relay": relay}), *options]
    with log.open("w") as output:
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)
    try:
        deadline_s = time.monotonic() + 240
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health"):
                    break
            except OSError:
                alive = process.poll() is None and time.monotonic() < deadline_s
                assert alive, log.read_text()[-4000:]
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(method: str, url: str, body: Any = None, key: str = API_KEY) -> tuple[int, str]:
    """Status and page.

    Args:
        body: a text, or what becomes JSON.
    """
    data = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
