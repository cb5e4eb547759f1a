# SPDX-License-Identifier: Apache-2.0
"""What users give, checked and named in messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

REFUSED, INTERRUPTED = 2, 130
"""Exit statuses of commands whose command line is refused, and that Ctrl-C has ended."""

_HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")


class CommandLineError(Exception):
    """A command is refused: an option, a value, or a file that cannot be opened."""


@contextmanager
def reading_command_line() -> Iterator[None]:
    """What is refused in here is the command line.

    Raises:
        CommandLineError: instead of a ValueError or an OSError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise CommandLineError(str(error)) from error


def check_writable(option: str, path: Path | None, source: Path | None = None) -> None:
    """Refuse a file that cannot be written, or is the input, before anything is computed for it.

    Raises:
        ValueError: names the option.
    """
    if path is None:
        return
    exists = path.exists()
    if exists and source is not None and source.exists() and path.samefile(source):
        raise ValueError(f"{option} {path}: that is the input, expected another file")
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot write there ({error.strerror})") from error
    if not exists:
        path.unlink()


def check_model(model: str, name: str = "--model") -> None:
    """Refuse what is no folder with a model and cannot be a hub id. Addresses and single files
    (GGUF) are left to vLLM.

    Args:
        name: of the argument, for the message.

    Raises:
        ValueError: says what was expected.
    """
    path = Path(model)
    if "://" in model or path.suffix == ".gguf":
        return
    if any((path / file).is_file() for file in ("config.json", "params.json")):
        return
    expected = "expected a Hugging Face model folder or a hub id"
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        raise ValueError(f"{name} {model}: no config.json there; {expected}")
    # some formats have a quantization behind a colon
    if not _HUB_ID.fullmatch(model.partition(":")[0]):
        raise ValueError(f"{name} {model}: no such folder; {expected}, name or owner/name")


def check_count(name: str, given: object) -> None:
    """Refuse what is no number of things, of which there is one at least.

    Raises:
        ValueError: names it.
    """
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name}={given!r} given, expected at least 1, an integer")


def is_integer(value: object) -> bool:
    """Whether it is a number without a fraction; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number; true and false are none."""
    return is_integer(value) or isinstance(value, float)


def shortened(value: object, most: int = 60) -> str:
    """What was given, for a message: no more than its beginning and its end."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[: most - 13]}...{shown[-10:]}"
