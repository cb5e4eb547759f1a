# SPDX-License-Identifier: Apache-2.0
"""Actors where Ray has room for them, as one engine."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

# read when Ray is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from vllm_relay.cluster.ray.actor_options import fit_into_actor
from vllm_relay.tables.engines.base import Engine, EngineError
from vllm_relay.tables.engines.ray_actors.engine import RayEngine, reply_of
from vllm_relay.tables.engines.ray_actors.replica import (
    Replica,
    ReplicaFacts,
    installed_versions,
    start_vllm,
)
from vllm_relay.tables.engines.replicas import ReplicaEngine
from vllm_relay.tables.engines.server.models import TokenizerError, checked_tokenizer

logger = logging.getLogger("vllm.relay")

REPLY_TIMEOUT_S = 300.0
"""After which an actor that is silent is lost."""

_CALLS_AT_ONCE = 16
_OBJECT_STORE_BYTES = 256 << 20


def start_replicas(model: str, num_replicas: int, **arguments: Any) -> ReplicaEngine:
    """Start a model several times with Ray: on this machine, or on the cluster that the variable
    RAY_ADDRESS names; where Ray runs in this process already, there.

    Each replica has an actor, and the GPUs that `arguments` ask for where there are any.

    Args:
        model: a folder or hub id, the same on every machine.
        arguments: of ``vllm.LLM``, see `start_engine`.

    Raises:
        ValueError: there are too few GPUs, vLLM refuses the model or an argument, or the replicas
            are not alike.
        EngineError: a replica does not start.
    """
    num_gpus = fit_into_actor(arguments, arguments)
    return start_actors(partial(start_vllm, model, arguments), num_replicas, num_gpus)


def start_actors(
    open_engine: Callable[[], Engine], num_replicas: int, num_gpus: int = 1
) -> ReplicaEngine:
    """As `start_replicas`, with any engine.

    Args:
        num_gpus: of each, where there are any.
    """
    names = [f"replica {number}" for number in range(num_replicas)]
    with ExitStack() as on_failure:
        on_close = ExitStack()
        on_failure.callback(on_close.close)
        is_cluster = _connect(on_close)
        num_gpus = checked_gpus(num_replicas, num_gpus, is_cluster)
        actor_class: Any = ray.remote(Replica).options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy="SPREAD",
        )
        actors = []
        for _ in names:
            actors.append(actor_class.remote(open_engine))
            on_close.callback(_kill, actors[-1])
        machines = _replies([actor.machine.remote() for actor in actors], names)
        starting = [
            actor.start.remote(machines[:number].count(machine), machines.count(machine))
            for number, (actor, machine) in enumerate(zip(actors, machines, strict=True))
        ]
        found = _replies(starting, names)
        _check_versions(dict(zip(names, found, strict=True)))
        tokenizer = _tokenizer(found[0])
        engines = [
            RayEngine(actor, facts, tokenizer, name, REPLY_TIMEOUT_S)
            for actor, facts, name in zip(actors, found, names, strict=True)
        ]
        opened = ReplicaEngine(engines, names, on_close=on_close)
        on_failure.pop_all()
        return opened


def _replies(replies: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [reply_of(each, name) for each, name in zip(replies, names, strict=True)]


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        ray.kill(actor)


def _connect(on_close: ExitStack) -> bool:
    """Returns whether other machines may be there."""
    if ray.is_initialized():
        return True
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address or "local"}
    if not address:
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        place = f"the cluster at RAY_ADDRESS={address}" if address else "on this machine"
        raise EngineError(f"Ray does not start or connect, {place}: {error}") from error
    on_close.callback(ray.shutdown)
    return bool(address)


def checked_gpus(num_replicas: int, num_gpus: int, is_cluster: bool) -> int:
    """Of each replica: none where Ray knows of none.

    Raises:
        ValueError: this machine has too few.
    """
    there = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    if not any(there):
        return 0
    num_places = sum(gpus // num_gpus for gpus in there)
    if num_places >= num_replicas:
        return num_gpus
    shortage = (
        f"{num_replicas} replicas with {num_gpus} GPUs each given, and Ray has GPUs for "
        f"{num_places} ({', '.join(map(str, there))} on its machines)"
    )
    if not is_cluster:
        raise ValueError(f"{shortage}: give fewer replicas")
    logger.warning("vllm-relay: %s: waiting for more", shortage)
    return num_gpus


def _check_versions(found: Mapping[str, ReplicaFacts]) -> None:
    here = installed_versions()
    versions = {"this process": here} | {name: facts.versions for name, facts in found.items()}
    if any(each != here for each in versions.values()):
        listed = "; ".join(
            f"{name}: " + ", ".join(f"{package} {number}" for package, number in each.items())
            for name, each in versions.items()
        )
        raise ValueError(
            f"replicas with different versions given ({listed}), expected equal ones: install the "
            f"same on every machine"
        )


def _tokenizer(facts: ReplicaFacts) -> Any | None:
    if facts.pickled_tokenizer is not None:
        # what a tokenizer is made of may be missing here
        with suppress(Exception):
            return pickle.loads(facts.pickled_tokenizer)
    if not facts.tokenizer_root:
        return None
    try:
        return checked_tokenizer(facts.tokenizer_root, facts.tokenizer_root, None)
    except TokenizerError as error:
        raise ValueError(f"{error}: the model is needed in this process too") from error
