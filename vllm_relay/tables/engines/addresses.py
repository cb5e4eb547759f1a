# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers as they are given, and which of them are the same server."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

from vllm_relay.tables.engines.server.keys import is_loopback

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
        address: of a server.

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
