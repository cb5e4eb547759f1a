# SPDX-License-Identifier: Apache-2.0
"""What commands end with where `vllm_relay.cli` is not around them."""

from __future__ import annotations

from collections.abc import Callable

from vllm_relay.arguments import REFUSED, CommandLineError


def ended(run: Callable[[], int]) -> tuple[int, str]:
    """The exit status, and why the command line was refused."""
    try:
        return run(), ""
    except CommandLineError as error:
        return REFUSED, str(error)
