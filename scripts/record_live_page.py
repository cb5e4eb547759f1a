# SPDX-License-Identifier: Apache-2.0
"""Record what the live page is told while the demo's model answers: conversations that begin with a
few long system prompts, of which one is pinned and one evicted. The page plays it without a server.

usage: .venv/bin/python scripts/record_live_page.py [--seconds 90] [--log FILE] [OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.workload import ledger_workload
from vllm_relay.page.viewers import Event
from vllm_relay.serving.page import STATIC

KEY = "recording"
START_S = 300
MAX_BYTES = 300_000
CLIENTS = 10
OPTIONS = [
    *("--served-model-name", "recall", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "4096", "--block-size", "32", "--num-gpu-blocks-override", "350"),
    *("--max-num-seqs", "8", "--attention-backend", "relay", "--api-key", KEY),
    *("--additional-config.relay.scheduler", "true", "--additional-config.relay.page", "true"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what the live page is told.")
    parser.add_argument("out", nargs="?", type=Path, default=STATIC / "demo.jsonl")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_recall_model(folder, dtype="float32")
        with serving(model, arguments.log) as address:
            lines = record(address, arguments.seconds)
    num_bytes = sum(len(line) + 1 for line in lines)
    if num_bytes > MAX_BYTES:
        print(f"{num_bytes} bytes were recorded, expected at most {MAX_BYTES}: record for less")
        return 1
    arguments.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} events, {num_bytes} bytes: {arguments.out}")
    return 0


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The address of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *OPTIONS]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    with open(log, "w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    address, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the server did not start; see {log}") from None
                time.sleep(0.5)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def record(address: str, seconds: float) -> list[str]:
    """The lines of a recording, while conversations go on."""
    ends_s = time.monotonic() + seconds
    conversations = Conversations(address, ends_s)
    clients = [threading.Thread(target=conversations.go_on, args=(i,)) for i in range(CLIENTS)]
    lines: list[str] = []
    began_s = 0.0
    acts = [(0.3, pin_most_used), (0.7, evict_least_used)]
    nodes: dict[int, dict[str, Any]] = {}
    with request(f"{address}/relay/forest/events?texts=1") as answer:
        for event in events(answer):
            if not lines:
                began_s = time.monotonic()
                for client in clients:
                    client.start()
            passed_s = time.monotonic() - began_s
            line = {"t": round(passed_s, 2), "event": event.kind, "data": event.data}
            lines.append(json.dumps(line, separators=(",", ":")))
            follow(nodes, event)
            if acts and passed_s > seconds * acts[0][0] and acts[0][1](address, nodes):
                acts.pop(0)
            if time.monotonic() > ends_s:
                break
    for client in clients:
        client.join()
    return lines


def events(answer: Any) -> Iterator[Event]:
    kind = ""
    for raw in answer:
        name, _, value = raw.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield Event(kind, json.loads(value))


def follow(nodes: dict[int, dict[str, Any]], event: Event) -> None:
    """Keep what is told of nodes."""
    if event.kind == "snapshot":
        nodes.clear()
    for node in event.data.get("nodes", event.data.get("added", ())):
        nodes[node["id"]] = node
    for change in event.data.get("changed", ()):
        nodes[change["id"]] |= change
    for number in event.data.get("removed", ()):
        del nodes[number]


def pin_most_used(address: str, nodes: dict[int, dict[str, Any]]) -> bool:
    node = max(nodes.values(), key=lambda node: node["hits"] * node["tokens"])
    return asked(f"{address}/relay/pins", {"source": "0", "node": node["id"]})


def evict_least_used(address: str, nodes: dict[int, dict[str, Any]]) -> bool:
    free = [node for node in nodes.values() if not node["running"] and node["next_out"] is not None]
    if not free:
        return False
    node = min(free, key=lambda node: node["next_out"])
    return asked(f"{address}/relay/forest/evict", {"source": "0", "node": node["id"]})


class Conversations:
    """Clients ask one question after the other, now and then about the answer they had."""

    def __init__(self, address: str, ends_s: float) -> None:
        self._address = address
        self._ends_s = ends_s
        self._ledgers = ledger_workload(
            num_system_prompts=7, system_prompt_tokens=900, questions_per_prompt=40, output_tokens=6
        )

    def go_on(self, client: int) -> None:
        rng = random.Random(client)
        prompt = ""
        while time.monotonic() < self._ends_s:
            ledger = self._ledgers[min(int(rng.expovariate(0.5)), len(self._ledgers) - 1)]
            if not prompt or rng.random() < 0.4:
                prompt = ledger.system_prompt
            prompt += " " + rng.choice(ledger.questions).text
            body = {"model": "recall", "prompt": prompt, "max_tokens": rng.randint(16, 80)}
            body |= {"temperature": 0.0, "ignore_eos": True}
            with request(f"{self._address}/v1/completions", body) as answer:
                prompt += json.load(answer)["choices"][0]["text"]
            time.sleep(rng.expovariate(2.0))


def asked(url: str, body: dict[str, Any]) -> bool:
    """Whether a server has done what it was asked."""
    try:
        request(url, body).close()
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
        return False
    return True


def request(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers))


if __name__ == "__main__":
    sys.exit(main())
