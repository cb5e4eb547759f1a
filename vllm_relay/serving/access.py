# SPDX-License-Identifier: Apache-2.0
"""Who may use the routes under /relay, and for what.

vLLM guards by prefixes of paths, which a `--root-path` can spoil, so each route asks for the key
itself.
"""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.owners import NOBODY
from vllm_relay.config import SECTION, RelayConfig, Routes


def mount(app: FastAPI, router: APIRouter) -> None:
    """Add routes under /relay, unless the server is to have none."""
    if routes_of(app) != "off":
        app.include_router(router)


def routes_of(app: FastAPI) -> Routes:
    """The option `routes` of a server."""
    additional_config = getattr(_arguments(app), "additional_config", None) or {}
    return RelayConfig.from_options(additional_config.get("relay")).routes


def check_access(request: Request) -> str:
    """Who sends a request to a route under /relay, as an owner: the place of its API key among
    those of the server, which is no secret.

    Raises:
        CommandError: 401 the key is missing or wrong, 403 the request changes something, and the
            server has no key.
    """
    keys = api_keys(_arguments(request.app))
    if not keys:
        if request.method not in ("GET", "HEAD") and routes_of(request.app) != "open":
            raise CommandError(
                403,
                "this server has no API key, so its routes under /relay change nothing: start it "
                f"with --api-key, or, where all who reach it are trusted, with {SECTION}.routes="
                "open",
            )
        return NOBODY
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_key = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(is_key):
        raise CommandError(401, "expected the header 'Authorization: Bearer API_KEY'")
    return f"api-key-{is_key.index(True)}"


def api_keys(arguments: Any) -> list[str]:
    """Of the command line of a server, as vLLM takes them."""
    from vllm import envs

    given = getattr(arguments, "api_key", None) or [envs.VLLM_API_KEY]
    return [key for key in given if key]


def _arguments(app: FastAPI) -> Any:
    """Of the command line."""
    return getattr(app.state, "args", None)
