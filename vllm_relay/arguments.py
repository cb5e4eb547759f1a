# SPDX-License-Identifier: Apache-2.0
"""What users give, checked and named in messages."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path


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


def check_model(model: str) -> None:
    """Refuse what looks like a folder and holds no model; anything else may be a hub id.

    Raises:
        ValueError: says what was expected.
    """
    path = Path(model)
    looks_local = path.exists() or path.is_absolute() or model.startswith(".")
    if looks_local and not (path / "config.json").is_file():
        raise ValueError(
            f"--model {model}: no config.json there; expected a Hugging Face model folder or a "
            "hub id"
        )


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
