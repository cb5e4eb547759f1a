# SPDX-License-Identifier: Apache-2.0
"""The error of commands."""

from __future__ import annotations


class CommandError(Exception):
    """A pin or a context that cannot be made or found; for pins, users import it as `PinError`.

    Args:
        status: the HTTP status that says so: 400, 401, 403, 404, 409, 501 or 507.
        message: what was given, what was expected, what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
