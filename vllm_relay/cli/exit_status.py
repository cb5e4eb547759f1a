# SPDX-License-Identifier: Apache-2.0
"""How commands end that do not end by themselves: docs/options.md has the exit statuses."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from vllm_relay.arguments import INTERRUPTED, REFUSED, CommandLineError


class Commands(TyperGroup):
    """Commands that end with a line and a status where they are refused or interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandLineError as error:
            console = Console(stderr=True, soft_wrap=True)
            console.print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(REFUSED) from error
        except (KeyboardInterrupt, typer.Abort) as error:
            asked = isinstance(
                error, typer.Abort
            )  # a question, which may have met the end of stdin
            if asked and not isinstance(error.__context__, KeyboardInterrupt):
                raise
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
