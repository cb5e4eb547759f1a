# SPDX-License-Identifier: Apache-2.0
"""The error of commands."""

from __future__ import annotations

from typing import NoReturn

from vllm_relay.config import SECTION


class CommandError(Exception):
    """A pin or a context that cannot be made or found; for pins, users import it as `PinError`.

    Args:
        status: the HTTP status that says so: 400, 401, 403, 404, 409, 501 or 507.
        message: what was given, what was expected, what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refuse_configured(what: str, option: str) -> NoReturn:
    """
    Raises:
        CommandError: 403, always: who asks did not make it.
    """
    raise CommandError(
        403,
        f"{what} is of the server's configuration: change {SECTION}.{option} and start the server "
        "again",
    )
