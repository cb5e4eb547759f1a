# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's engine on the command line, read by vLLM's own parser."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn


def split_arguments(given: Sequence[str]) -> tuple[list[Path], dict[str, Any]]:
    """Files, and arguments of ``vllm.LLM`` from the options between them.

    Raises:
        ValueError: an option is none of vLLM's engine, or has no value of its type.
    """
    if not any(each.startswith("-") for each in given):
        return [Path(each) for each in given], {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def parse_known_args(
            self, args: Any = None, namespace: Any = None
        ) -> tuple[Namespace, list[str]]:
            found, others = super().parse_known_args(args, namespace)
            found.files = [each for each in others if not each.startswith("-")]
            return found, [each for each in others if each.startswith("-")]

        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; options are those of vllm-relay sql and of vLLM's engine")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    # so that only what is given is found, also where it is the default
    for action in parser._actions:
        action.default = SUPPRESS
    found = vars(parser.parse_args(list(given)))
    names = [each.name for each in fields(EngineArgs) if each.name in found]
    return [Path(each) for each in found["files"]], {name: found[name] for name in names}
