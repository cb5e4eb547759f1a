# SPDX-License-Identifier: Apache-2.0
"""An engine from what there is: an LLM, a server's address or a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_relay.arguments import check_count, check_model
from vllm_relay.cluster.event_stream import EventEndpoints
from vllm_relay.tables.engines.addresses import addresses_of, lacks_scheme
from vllm_relay.tables.engines.base import Engine

# its other attributes may open it
_ENGINE_METHODS = ("generate", "max_answer_tokens", "prompts_per_s", "close")

_PATIENCE_OF_SEVERAL_S = 60.0
"""How long a server may be away where others have its prompts if it is not waited for."""


def is_engine(value: Any) -> bool:
    """Whether a value is an `Engine`, as far as its methods tell."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _ENGINE_METHODS)


def open_engine(
    engine: Any,
    *,
    replicas: int | None = None,
    data_parallel_ranks: int | None = None,
    kv_events: Sequence[str] | None = None,
    **arguments: Any,
) -> Engine:
    """
    Args:
        engine: an `Engine`, which is given back; a ``vllm.LLM``; the address of a server with
            OpenAI's API, "http://..." or "https://...", or a list of several with the same model;
            or a model, a folder or hub id, which is started in this process with prefix caching,
            and with relay where that can serve it.
        replicas: of the model, started by Ray if there are more than one, see `start_replicas`.
        data_parallel_ranks: of each server, with which ``vllm serve --data-parallel-size`` started
            it: each rank has a prefix cache of its own, and gets the prompts that it knows.
        kv_events: of each server, in their order, where it publishes KV events of vLLM,
            "tcp://host:port", and with a comma where it replays them: prompts go by what caches
            hold, not by what they were sent. Of many beginnings that wait, a server finds those
            that it is told to hold among the 16 that wait longest. Ranks have the next ports.
        arguments: of a server, see `ServerEngine`, or of a model, those of ``vllm.LLM``; of all of
            them, if there are several.

    Returns:
        An engine; one over all, where there are several, see `ReplicaEngine`. Its `close` ends a
        model that was started here, and leaves an LLM alone.

    Raises:
        TypeError: `engine` is nothing of these.
        ValueError: there are arguments without effect, or the model or the server refuses them, or
            replicas are not alike.
        EngineError: a server does not answer, or a replica does not start.
    """
    if isinstance(engine, (str, Path)) and not str(engine).strip():
        raise ValueError(
            "an empty engine was given, expected a model or a server's address, http://..."
        )
    addresses = addresses_of(engine)
    is_model = not addresses and isinstance(engine, (str, Path))
    _check_option("replicas", replicas, "a model that is started here", is_model)
    _check_option("data_parallel_ranks", data_parallel_ranks, "servers", bool(addresses))
    if kv_events and not addresses:
        raise ValueError("kv_events given, which are those of servers: leave them out")
    endpoints = check_kv_events(kv_events or (), len(addresses), data_parallel_ranks)
    if addresses:
        return _open_servers(addresses, data_parallel_ranks, endpoints, arguments)
    if is_model:
        _check_no_address(str(engine), arguments)
        num_replicas = replicas or 1
        if num_replicas == 1 or not os.environ.get("RAY_ADDRESS"):
            # other machines may have other folders
            check_model(str(engine), "engine")
        if num_replicas > 1:
            return _start_replicas(str(engine), num_replicas, arguments)
        from vllm_relay.tables.engines.in_process import start_engine

        return start_engine(str(engine), **arguments)
    if arguments:
        raise ValueError(
            f"{sorted(arguments)} given with a {type(engine).__name__}: they are for a model or a "
            f"server that is opened here; leave them out"
        )
    if _is_llm(engine):
        from vllm_relay.tables.engines.in_process import InProcessEngine

        return InProcessEngine(engine)
    if is_engine(engine):
        return engine
    raise TypeError(
        f"engine {engine!r} given, expected a model (a folder or hub id), a server's address "
        f"(http://...) or a list of several, a vllm.LLM or an Engine"
    )


def check_kv_events(
    given: Sequence[str], num_servers: int, data_parallel_ranks: int | None
) -> list[EventEndpoints]:
    """
    Args:
        given: of each server; none, if there are none.

    Raises:
        ValueError: they are not one for each server, or of no use.
    """
    if not given:
        return []
    if isinstance(given, str) or len(given) != num_servers:
        number = 1 if isinstance(given, str) else len(given)
        raise ValueError(
            f"KV events of {number} servers given, expected those of {num_servers}: give one "
            f"endpoint for each server, in their order"
        )
    if num_servers * (data_parallel_ranks or 1) == 1:
        raise ValueError(
            "KV events given for one engine, which all prompts go to: they are for several "
            "servers, or for the ranks of one"
        )
    for each in given:
        if not isinstance(each, str) or given.count(each) > 1:
            raise ValueError(
                f"KV events {list(given)!r} given, expected an endpoint tcp://HOST:PORT of its own "
                f"for each server"
            )
    endpoints = [EventEndpoints.of(each) for each in given]
    if data_parallel_ranks and any("ipc:" in each for each in given):
        raise ValueError(f"KV events at {given[0]!r} given with ranks, which have ports: give tcp:")
    return endpoints


def _check_option(name: str, count: int | None, whose: str, is_theirs: bool) -> None:
    if count is None:
        return
    check_count(name, count)
    if not is_theirs:
        other = {
            "replicas": "several servers are given as a list of their addresses",
            "data_parallel_ranks": "a model that is started here has replicas=",
        }
        raise ValueError(f"{name}={count} given, which is for {whose}: {other[name]}")


def _open_servers(
    addresses: list[str],
    ranks: int | None,
    endpoints: list[EventEndpoints],
    arguments: dict[str, Any],
) -> Engine:
    from vllm_relay.tables.engines.replicas import ReplicaEngine
    from vllm_relay.tables.engines.server.engine import ServerEngine
    from vllm_relay.tables.engines.server.http import RetryPolicy

    places: list[tuple[str, dict[str, Any]]]
    places = [(address, {}) for address in addresses]
    if ranks is not None:
        named = [{"data_parallel_rank": rank} for rank in range(ranks)]
        places = [(address, each) for address in addresses for each in named]
    if len(places) == 1:
        [(address, rank)] = places
        return ServerEngine(address, **arguments, **rank)
    arguments = {"retries": RetryPolicy(patience_s=_PATIENCE_OF_SEVERAL_S), **arguments}
    names = [
        address + "".join(f", rank {number}" for number in rank.values())
        for address, rank in places
    ]
    engines: list[Engine] = []
    with ExitStack() as opened:
        for address, rank in places:
            engines.append(ServerEngine(address, **arguments, **rank))
            opened.callback(engines[-1].close)
            if engines[0].tokenizer is not None:
                # loaded once; the others compare it with their server's
                arguments = {**arguments, "tokenizer": engines[0].tokenizer}
        engine = ReplicaEngine(engines, names)
        if endpoints:
            each_rank = [each for each in endpoints for _ in range(ranks or 1)]
            engine.hear(each_rank, [rank.get("data_parallel_rank") for _, rank in places])
        opened.pop_all()
    return engine


def _start_replicas(model: str, num_replicas: int, arguments: dict[str, Any]) -> Engine:
    if (arguments.get("data_parallel_size") or 1) > 1:
        raise ValueError(
            f"data_parallel_size={arguments['data_parallel_size']} and replicas={num_replicas} "
            f"given, which mean the same: give replicas alone"
        )
    try:
        from vllm_relay.tables.engines.ray_actors.starting import start_replicas
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError(
            f"replicas={num_replicas} given, which Ray starts, and Ray is not installed: run "
            f"pip install 'vllm-relay[ray]', or give the addresses of servers that run"
        ) from None
    return start_replicas(model, num_replicas, **arguments)


def _check_no_address(model: str, arguments: dict[str, Any]) -> None:
    """Refuse what is a server's address but for its beginning."""
    if (lacks_scheme(model) and not Path(model).exists()) or "model" in arguments:
        raise ValueError(
            f"engine {model!r} given"
            + (f" with model={arguments['model']!r}" if "model" in arguments else "")
            + f", expected a model alone, or a server's address, which begins with http:// or "
            f"https://: for a server give {f'http://{model}'!r}"
        )


def _is_llm(value: Any) -> bool:
    # whoever has an LLM has imported vLLM
    vllm = sys.modules.get("vllm")
    return vllm is not None and isinstance(value, vllm.LLM)
