# SPDX-License-Identifier: Apache-2.0
"""Who made what front ends keep, and so may change it."""

from __future__ import annotations

from typing import NoReturn

from vllm_relay.commands.errors import CommandError
from vllm_relay.config import SECTION

CONFIGURATION = "configuration"
"""The owner of what options list."""
PYTHON = "python"
"""The owner of what is made through an `LLM`, or in the process of an AsyncLLM."""
NOBODY = "http"
"""The owner of what is made on a server without API keys."""


def check_owner(what: str, owner: str, asking: str, *, option: str) -> None:
    """
    Args:
        what: is to be changed, as errors call it.
        asking: who wants to.
        option: the one that makes those of the configuration.

    Raises:
        CommandError: 403 it is another owner's.
    """
    if owner == asking:
        return
    if owner == CONFIGURATION:
        refuse_configured(what, option)
    raise CommandError(403, f"{what} belongs to {owner}, not to {asking}: leave it to its owner")


def refuse_configured(what: str, option: str) -> NoReturn:
    """
    Raises:
        CommandError: 403, always.
    """
    raise CommandError(
        403,
        f"{what} is of the server's configuration: change {SECTION}.{option} and start the server "
        "again",
    )
