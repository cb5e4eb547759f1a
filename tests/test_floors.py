# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package stand on floors: imports go down, never up, and in no circle.

All imports count, those in functions and those for types too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_relay

PACKAGE = Path(vllm_relay.__file__).parent
BENCHMARKS = PACKAGE.parent / "benchmarks"
ROOMS = [
    "vllm_relay",  # its version
    "vllm_relay._C",
    "vllm_relay.arguments",
    "vllm_relay.processor",
    "vllm_relay.limits",
    "vllm_relay.ranked",
    "vllm_relay.progress",
    "vllm_relay.config",
    "vllm_relay.vllm_changes",
    "vllm_relay.statistics_log",
    "vllm_relay.commands",
    "vllm_relay.attention_backends",
    "vllm_relay.modules",
    "vllm_relay.prefix_cache",
    "vllm_relay.scheduler",
    "vllm_relay.cluster",
    "vllm_relay.sparse.files",
    "vllm_relay.sparse.index",
    "vllm_relay.sparse.plan",
    "vllm_relay.sparse.contexts",
    "vllm_relay.sparse.transformers",
    "vllm_relay.sparse",
    "vllm_relay.long_context",
    "vllm_relay.attention_backends.sparse",
    "vllm_relay.page",
    "vllm_relay.serving",
    "vllm_relay.metrics",
    "vllm_relay.wiring",
    "vllm_relay.plugin",
    "vllm_relay.tables",
    "vllm_relay.demo",
    "vllm_relay.tune",
    "vllm_relay.calibrate",
    "vllm_relay.doctor",
    "vllm_relay.cli",
]
"""From the ground up. What is in a room that is no room itself belongs to the room around it."""

FACADES = {
    # what users import from a room, by a name that they know, and stands above it
    ("vllm_relay.modules", "vllm_relay.serving.modular_llm"),
}
MAX_FILES = 14
MAX_FILES_WITHOUT_LIST = 6


def name_of(file: Path) -> str:
    parts = ("vllm_relay", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each in (*MODULES, "vllm_relay._C") else node.module for each in inner]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "vllm_relay")


@cache
def imports() -> dict[str, set[str]]:
    return {module: set(imports_of(module)) - {module} for module in MODULES}


def floor_of(module: str) -> int:
    """That of the innermost room it is in."""
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return ROOMS.index(module)


def test_every_top_module_is_a_room() -> None:
    top = {".".join(module.split(".")[:2]) for module in MODULES}
    assert top == {room for room in ROOMS if room.count(".") <= 1} - {"vllm_relay._C"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    up = {
        imported
        for imported in imports()[module]
        if floor_of(imported) > floor_of(module) and (module, imported) not in FACADES
    }
    assert not up, f"{module} stands below {', '.join(sorted(up))}"


def test_no_circles() -> None:
    graph = {
        module: {each for each in imported if (module, each) not in FACADES}
        for module, imported in imports().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(error.args[1]))


FOLDERS = {file.parent for file in MODULES.values()}
BENCHMARK_FOLDERS = {file.parent for file in BENCHMARKS.rglob("*.py")}


def full(folders: set[Path], root: Path) -> set[str]:
    """Those with too many files."""
    return {
        folder.relative_to(root).as_posix()
        for folder in folders
        if len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) > MAX_FILES
    }


def test_folders_can_be_seen_into() -> None:
    assert full(FOLDERS, PACKAGE) == set()
    assert full(BENCHMARK_FOLDERS, BENCHMARKS) == {"cuda"}, "cuda is rebuilt: say none"


LISTED = re.compile(r"(?:^ *|, )(\w+)(\.py|/(?=[ ,]))", re.MULTILINE)
"""A file or folder in a list of a folder's docstring."""


@pytest.mark.parametrize(
    "folder", sorted((FOLDERS - {PACKAGE}) | (BENCHMARK_FOLDERS - {BENCHMARKS / "cuda"}))
)
def test_folders_say_what_is_in_them(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()), clean=False)
    assert text, f"{folder} does not say what it is"
    listed = {"".join(each) for each in LISTED.findall(text)}
    if not listed and len(list(folder.glob("*.py"))) <= MAX_FILES_WITHOUT_LIST:
        return
    files = {f"{file.name}" for file in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{each.name}/" for each in folder.iterdir() if (each / "__init__.py").exists()}
    assert listed == files | folders
