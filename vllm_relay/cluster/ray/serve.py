# SPDX-License-Identifier: Apache-2.0
"""`serve run vllm_relay.cluster.ray.serve:app model=MODEL replicas=2`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ray import serve
from vllm.platforms import current_platform

from vllm_relay.arguments import check_model
from vllm_relay.cluster.ray.actor_options import fit_into_actor
from vllm_relay.cluster.ray.endpoint import one_endpoint
from vllm_relay.cluster.ray.replica import VllmReplica, parsed, serve_arguments

_NOT_HERE = {
    **dict.fromkeys(("host", "port", "uds"), "Ray Serve listens: serve start --http-port"),
    **dict.fromkeys(
        ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
        "Ray Serve listens: give ssl_keyfile and ssl_certfile in its HTTP options",
    ),
    "enable_ssl_refresh": "Ray Serve listens, and does not reload certificates",
    "root_path": "Ray Serve listens: give root_path in its HTTP options",
    "uvicorn_log_level": "Ray Serve listens: give logging_config to the application",
    "grpc": "Ray Serve listens, over HTTP",
    "api_server_count": "give endpoints, the processes that route",
    **dict.fromkeys(
        (
            *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
            *("data_parallel_start_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb"),
            "headless",
        ),
        "give replicas",
    ),
    **dict.fromkeys(("nnodes", "node_rank"), "a replica is on one machine"),
}

_FILES = {"model", "chat_template", "tool_parser_plugin", "reasoning_parser_plugin", "config"}
"""Options with files or folders: replicas have another working directory."""


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run` and `serve deploy` start.

    Args:
        args: `model`, `replicas`, and options of `vllm serve` by their names. `endpoints` is the
            number of processes that route, 1 unless it is given; `gpus` those of a replica,
            the product of its parallel sizes unless it is given.

    Raises:
        ValueError: an argument is missing, or vLLM refuses one.
    """
    options = {_underscored(name): value for name, value in args.items()}
    num_replicas = _count(options, "replicas", 1)
    num_endpoints = _count(options, "endpoints", 1)
    model = options.get("model")
    if not isinstance(model, str) or not model:
        what = "no model" if not model else f"model={model!r}"
        raise ValueError(f"{what} given: add model=FOLDER_OR_HUB_ID")
    check_model(model, "model")
    for name in _FILES & options.keys():
        given = options[name]
        if isinstance(given, str) and os.path.exists(given):  # else a hub id, or a template itself
            options[name] = str(Path(given).resolve())
    for name in _NOT_HERE.keys() & options.keys():
        raise ValueError(f"{name}={options[name]} given: {_NOT_HERE[name]}")
    gpus = options.pop("gpus", None)
    if gpus is not None:
        gpus = _number("gpus", gpus)
    num_gpus: float = fit_into_actor(options, vars(parsed(serve_arguments(options))))
    if gpus is not None:
        num_gpus = gpus
    elif current_platform.is_cpu():
        num_gpus = 0
    return one_endpoint(
        VllmReplica,
        serve_arguments(options),
        num_replicas=num_replicas,
        num_endpoints=num_endpoints,
        ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus},
    )


def _underscored(name: str) -> str:
    option, dot, key = name.partition(".")
    return option.replace("-", "_") + dot + key


def _count(options: dict[str, Any], name: str, default: int) -> int:
    given = options.pop(name, default)
    if not str(given).isdecimal() or int(given) < 1:
        raise ValueError(f"{name}={given} given, expected at least 1, an integer")
    return int(given)


def _number(name: str, given: Any) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={given} given, expected a number, 0 or more")
    return number
