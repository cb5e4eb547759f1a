# SPDX-License-Identifier: Apache-2.0
"""Which API key goes to which server."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

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
        url: of the server.
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
