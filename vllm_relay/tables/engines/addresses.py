# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers, which of them are the same server, and which key goes to which."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d+(/.*)?")


def is_address(text: str) -> bool:
    """Whether it is meant as an address of a server, by its beginning."""
    return text.lower().startswith(tuple(f"{scheme}://" for scheme in _DEFAULT_PORTS))


def lacks_scheme(text: str) -> bool:
    """Whether it would be an address with http:// before it."""
    return _HOST_AND_PORT.fullmatch(text) is not None


def check_address(name: str, address: str) -> None:
    """
    Args:
        name: of the argument, for the message.

    Raises:
        ValueError: it is none.
    """
    given = f"{name} {address!r} given, expected an address that begins with http:// or https://"
    if not is_address(address):
        better = f"http://{address}" if lacks_scheme(address) else "http://host:8000"
        raise ValueError(f"{given}: give {better}")
    try:
        parts = urlsplit(address)
        is_whole = bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{given} and a host, as in http://localhost:8000")


def addresses_of(engine: Any) -> list[str]:
    """Of one server or of several; none if something else was given.

    Raises:
        ValueError: the list has none, something else, no whole address or one server twice.
    """
    if isinstance(engine, str):
        return [engine] if is_address(engine) else []
    if not isinstance(engine, (list, tuple)):
        return []
    if not engine:
        raise ValueError("an empty list of engines was given, expected servers' addresses")
    for each in engine:
        if not isinstance(each, str) or not is_address(each):
            raise ValueError(
                f"a list of engines with {each!r} given, expected servers' addresses, http://...: "
                f"for a model that is to be started several times give it alone, and replicas="
            )
        check_address("server", each)
    _check_different(engine)
    return list(engine)


def _check_different(addresses: Sequence[str]) -> None:
    for one, other in combinations(addresses, 2):
        if _place(one) == _place(other) and _is_same_host(_host(one), _host(other)):
            raise ValueError(
                f"servers {one!r} and {other!r} given, which are one: give each server once, and "
                f"the engines of one with data_parallel_ranks"
            )


def _place(address: str) -> tuple[int | None, str]:
    """The port and the path of a server, which tell those of a host apart."""
    parts = urlsplit(address)
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    return port, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")


def _host(address: str) -> str:
    host = (urlsplit(address).hostname or "").rstrip(".")
    # where a server listens on all of its addresses, and is reached on this machine
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _is_same_host(one: str, other: str) -> bool:
    """Two names of one address may be two servers behind a proxy, unless one is the other's
    beginning."""
    if one == other:
        return True
    is_alias = one.startswith(f"{other}.") or other.startswith(f"{one}.")
    is_number = any(is_loopback(each) or _is_number(each) for each in (one, other))
    return (is_alias or is_number) and bool(_resolved(one) & _resolved(other))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolved(host: str) -> set[object]:
    """The addresses of a host, none where nobody knows it."""
    try:
        return {found[4][0] for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


OPENAI_HOST = "api.openai.com"


@dataclass(frozen=True)
class ServerKey:
    """
    Attributes:
        value: None if none is sent.
        withheld: why there is none, if there might be one.
    """

    value: str | None = field(default=None, repr=False)
    withheld: str = ""


def is_safe(url: str) -> bool:
    """Whether what is sent to an address stays unread: it is encrypted, or of this machine."""
    parts = urlsplit(url)
    return parts.scheme.lower() == "https" or is_loopback(parts.hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def key_from_environment(
    url: str,
    variable: str | None,
    *,
    over_http: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> ServerKey:
    """The key that a user means for a server.

    Args:
        variable: that holds its key; None takes OPENAI_API_KEY for OpenAI's own host and
            VLLM_API_KEY for any other.
        over_http: whether it may be sent to another machine without encryption.

    Raises:
        ValueError: the variable is given and not set, or its key would be sent so.
    """
    is_named = variable is not None
    if variable is None:
        is_openai = (urlsplit(url).hostname or "").lower() == OPENAI_HOST
        variable = "OPENAI_API_KEY" if is_openai else "VLLM_API_KEY"
    value = environment.get(variable)
    if not value:
        if is_named:
            raise ValueError(f"the environment variable {variable} was named for the API key, but "
                             "it is not set")  # fmt: skip
        hint = ""
        if environment.get("OPENAI_API_KEY"):
            hint = f"OPENAI_API_KEY is sent to {OPENAI_HOST} only: name it with --api-key-env"
        return ServerKey(None, hint)
    if is_safe(url) or over_http:
        return ServerKey(value)
    refusal = unsafe_key(url, variable)
    if is_named:
        raise ValueError(refusal)
    return ServerKey(None, refusal)


def unsafe_key(url: str, name: str) -> str:
    """Why a key is not sent."""
    return (
        f"{name} is not sent to {urlsplit(url).hostname} without encryption, where others can read "
        f"it: give an address with https://, or --api-key-over-http (api_key_over_http=True)"
    )
