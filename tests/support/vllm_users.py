# SPDX-License-Identifier: Apache-2.0
"""Which test files touch vLLM: those that run again on each of its releases."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def touches_vllm(test_file: Path) -> bool:
    """Whether the file imports vLLM, or a module of the package that does, or a helper below tests/
    for which this is true. Imports in functions count, and modules that are named to be run.

    Further down the package nothing is followed: most of it reaches vLLM in the end.
    """
    pending, seen = [test_file], set()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        for module in modules_in(file):
            if module.split(".")[0] == "vllm":
                return True
            named = file_of(module)
            if named is None:
                continue
            if named.is_relative_to(ROOT / "tests") or named.name == "__init__.py":
                pending.append(named)
            elif any(inner.split(".")[0] == "vllm" for inner in modules_in(named)):
                return True
    return False


_IMPORT = re.compile(r"^ *import (.+)", re.MULTILINE)
_FROM = re.compile(r"^ *from (\S+) import (\([^)]*\)|.+)", re.MULTILINE)
_NAMED = re.compile(r'"(tests\.[\w.]+)"')


@cache
def modules_in(file: Path) -> frozenset[str]:
    """What may be names of modules there: those imported, what is imported from them, and strings
    that name a module below tests/.

    As the text looks: all processes of a run ask this of all files, and parsing them takes long.
    """
    source = file.read_text()
    names = {*_NAMED.findall(source), *re.findall(r"[\w.]+", " ".join(_IMPORT.findall(source)))}
    for module, imported in _FROM.findall(source):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))}
    return frozenset(names)


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None
