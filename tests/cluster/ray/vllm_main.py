# SPDX-License-Identifier: Apache-2.0
"""An endpoint over a model that Ray Serve starts twice, for test_vllm.py.

Usage: python -m tests.cluster.ray.vllm_main MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve

from tests.cluster.ray.endpoints import answer, connected, next_event
from tests.support.one_ray import one_ray
from tests.support.ports import free_port
from vllm_relay.cluster.ray.serve import app

ARGUMENTS: dict[str, Any] = {
    "served_model_name": "tiny",
    "replicas": 2,
    "dtype": "float32",
    "enforce_eager": "true",
    "block_size": 32,
    "num_gpu_blocks_override": 200,
    "enable_prompt_tokens_details": True,
    "additional_config.relay.page": "true",
    "additional_config.relay.routes": "open",
}
SYSTEMS = [f"system {number} that says much " * 8 for number in range(4)]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def ask(port: int, body: Any, path: str = CHAT) -> tuple[int, Any]:
    answer = connected(port, body, path)
    return answer.status, json.loads(answer.read())


def tokens_of(port: int, body: Any) -> list[int]:
    status, answer = ask(port, body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def streamed_tokens_of(port: int, body: Any) -> list[int]:
    lines = connected(port, {**body, "stream": True}, CHAT).read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def replicas() -> list[psutil.Process]:
    def is_replica(process: psutil.Process) -> bool:
        try:
            return process.cmdline()[0].startswith("ray::ServeReplica:default:replica")
        except (psutil.Error, IndexError):
            return False

    return [each for each in psutil.Process().children(recursive=True) if is_replica(each)]


def questions(port: int, asked: Any) -> dict[str, Any]:
    cached: list[list[int]] = []
    for system in SYSTEMS:
        usages = [ask(port, chat(system, f"question {n}"))[1]["usage"] for n in range(3)]
        cached.append([each["prompt_tokens_details"]["cached_tokens"] for each in usages])
    return {
        "cached_tokens": cached,
        "whole": tokens_of(port, asked),
        "streamed": streamed_tokens_of(port, asked),
        "no_json": ask(port, b"{"),
        "no_model": ask(port, {**asked, "model": "none"}),
        "too_long": ask(port, {"model": "tiny", "prompt": "x" * 2000}, COMPLETION),
    }


def page(port: int) -> dict[str, Any]:
    """What the page shows of each replica, and what is left of a prefix that is evicted in one."""
    assert connected(port, b"", "/relay/", "GET").read().startswith(b"<!doctype html>")
    stream = connected(port, b"", "/relay/forest/events?texts=1", "GET")
    prefixes: dict[str, list[int]] = {}
    while len(prefixes) < 2:
        kind, data = next_event(stream)
        if kind == "snapshot":
            prefixes[data["source"]] = [each["id"] for each in data["nodes"]]
    source, nodes = min(prefixes.items())
    asked = {"source": source, "node": nodes[0]}
    evicted = answer(port, "POST", "/relay/forest/evict", asked)
    while not (data := next_event(stream)[1]).get("removed"):
        pass
    stream.close()
    return {"prefixes": prefixes, "evicted": evicted, "asked": asked, "told": data}


def after_kill(port: int, asked: Any) -> dict[str, Any]:
    """Some answers have begun and others not when a replica is killed."""
    killed = replicas()[0]
    left = killed.children(recursive=True)
    long = [
        chat(f"{number} " * 40, "go on", max_tokens=200, ignore_eos=True) for number in range(8)
    ]
    streams = [connected(port, {**body, "stream": True}, CHAT) for body in long]
    for each in streams:
        assert each.readline().startswith(b"data: ")
    with ThreadPoolExecutor(len(long)) as pool:
        answers = [pool.submit(ask, port, body) for body in long]
        killed.kill()
        statuses = [each.result()[0] for each in answers]
    ends = [each.read().decode().strip().split("\n\n")[-2:] for each in streams]
    psutil.wait_procs(left, 60)
    return {
        "ends_of_streams": [[each.removeprefix("data: ") for each in end] for end in ends],
        "statuses_after_kill": statuses,
        "whole_after_kill": tokens_of(port, asked),
        "left_of_the_killed": [each.pid for each in left if each.is_running()],
    }


def main(model: str, folder: str) -> None:
    with one_ray():
        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app({"model": model, **ARGUMENTS}))
            found: dict[str, Any] = {"replicas": [each.pid for each in replicas()]}
            asked = chat(SYSTEMS[0], "and now?", return_token_ids=True)
            found |= questions(port, asked)
            found["page"] = page(port)
            found |= after_kill(port, asked)
        finally:
            serve.shutdown()
            ray.shutdown()
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
