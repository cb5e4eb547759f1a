# SPDX-License-Identifier: Apache-2.0
"""From what a scan finds to the table, and what of it does not fit together."""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import re
from pathlib import Path

from touch_points.findings import Call, Replacement, Scan
from touch_points.hints import BODIES, OWN_CONSTRUCTION
from touch_points.scan import scan
from vllm_relay.vllm_changes.contract.python_sources import Function, PythonSources
from vllm_relay.vllm_changes.contract.shapes import (
    ABSENT,
    body_of,
    decorators_of,
    parameters_of,
    shape_of,
)
from vllm_relay.vllm_changes.contract.table import TouchPoint, TouchPointTable

OURS = Path(__file__).parents[2] / "vllm_relay"


def release_of(folder: Path) -> str:
    """The release that a folder with the package vllm has."""
    version = folder / "_version.py"
    if version.is_file():
        found = re.search(r"^(?:__version__ = )?version = .(\d[\w.]*)", version.read_text(), re.M)
        if found:
            return found[1]
    return importlib.metadata.version("vllm").partition("+")[0]


def needed(vllm: Path, ours: Path) -> Scan:
    """All that is used of a vLLM."""
    collects = gc.isenabled()
    gc.disable()  # trees are no garbage, and looking through them takes half of the time
    try:
        found = scan(vllm, ours)
    finally:
        if collects:
            gc.enable()
    for path, files in BODIES.items():
        found.bodies[path] = {**found.bodies.get(path, {}), **files}
    return found


def record(table: TouchPointTable, found: Scan, vllm: Path, release: str) -> TouchPointTable:
    """The table with the shapes of a release. What only it needs is absent in the others, what it
    does not need and no other does is left out."""
    sources = PythonSources({"vllm": vllm})
    others = tuple(each for each in table.releases if each != release)
    known = {(each.path, each.is_body): each for each in table.points}
    uses = {
        path: {file: ", ".join(sorted(how)) for file, how in files.items()}
        for path, files in found.uses.items()
    }
    points = []
    for is_body, needs in ((False, uses), (True, found.bodies)):
        for path, needed_by in needs.items():
            point = known.get((path, is_body))
            shapes = {each: point.shapes.get(each, ABSENT) if point else ABSENT for each in others}
            shapes[release] = (body_of if is_body else shape_of)(sources, path)
            points.append(TouchPoint(path, needed_by, shapes, is_body))
    return TouchPointTable(tuple(sorted((*others, release))), tuple(points))


def misfits(found: Scan, vllm: Path, ours: Path) -> list[str]:
    """Calls that a vLLM would not take, replacements that would not take its calls, or that keep
    arguments to themselves which they do not know."""
    sources = PythonSources({"vllm": vllm, "vllm_relay": ours})
    told = [text for each in found.calls if (text := _misfit_of_call(sources, each))]
    for each in found.replacements:
        if text := _misfit_of_replacement(sources, each):
            told.append(text)
    return sorted(set(told))


def _misfit_of_call(sources: PythonSources, call: Call) -> str | None:
    node = call.node
    parameters = parameters_of(sources, call.path)
    found = sources.find(call.path)
    if parameters is None:
        return None
    names = [each.arg for each in [*parameters.posonlyargs, *parameters.args]]
    is_bound = "." in (found.name if found else "init.") and not (
        found and "staticmethod" in decorators_of(found.node)
    )
    if is_bound:
        names = names[1:]
    is_open = any(isinstance(each, ast.Starred) for each in node.args)
    where = f"called by {call.file} in line {node.lineno}"
    if not is_open and parameters.vararg is None and len(node.args) > len(names):
        return f"{call.path}: takes {len(names)} arguments, not {len(node.args)}; {where}"
    keywords = {each.arg for each in node.keywords if each.arg}
    known = {*names, *(each.arg for each in parameters.kwonlyargs)}
    if parameters.kwarg is None and (unknown := keywords - known):
        return f"{call.path}: takes no {', '.join(sorted(unknown))}; {where}"
    if is_open or any(each.arg is None for each in node.keywords):
        return None
    num_defaults = len(parameters.defaults)
    required = set(names[: len(names) - num_defaults if num_defaults else len(names)])
    required -= {*names[: len(node.args)], *keywords}
    pairs = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    required |= {each.arg for each, default in pairs if default is None} - keywords
    if required:
        return f"{call.path}: needs {', '.join(sorted(required))}; {where}"
    return None


def _misfit_of_replacement(sources: PythonSources, ours: Replacement) -> str | None:
    theirs = sources.find(ours.path)
    if theirs is None or not isinstance(theirs.node, Function):
        return None
    wanted, taken = theirs.node.args, ours.node.args
    where = f"replaced by {ours.node.name} in {ours.file}"
    # only vllm-relay makes objects of some of its classes, and knows what it makes them of
    takes_all = taken.vararg is not None and taken.kwarg is not None
    if ours.passes_on and not takes_all and ours.node.name != "__init__":
        return f"{ours.path}: arguments it does not know are not passed on; {where}"
    if ours.node.name == "__init__" and not takes_all and ours.path in OWN_CONSTRUCTION:
        return None
    names = [each.arg for each in [*wanted.posonlyargs, *wanted.args]]
    ours_names = [each.arg for each in [*taken.posonlyargs, *taken.args]]
    if taken.vararg is None and len(names) - _bound(theirs.node) > len(ours_names) - _bound(
        ours.node
    ):
        return f"{ours.path}: gets {', '.join(names)}; {where} takes {', '.join(ours_names)}"
    if taken.kwarg is None:
        known = {*ours_names, *(each.arg for each in taken.kwonlyargs)}
        missing = {each.arg for each in wanted.kwonlyargs} - known
        if missing:
            return f"{ours.path}: gets {', '.join(sorted(missing))}; {where} does not take it"
    return None


def _bound(node: Function) -> int:
    """1 if its first parameter is the object or the class it is called on."""
    first = node.args.args[:1]
    return int(bool(first) and first[0].arg in ("self", "cls"))
