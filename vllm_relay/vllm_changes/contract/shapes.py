# SPDX-License-Identifier: Apache-2.0
"""The shape of what vLLM defines: one line that changes when it is used differently."""

from __future__ import annotations

import ast
import hashlib

from vllm_relay.vllm_changes.contract.python_sources import (
    Definition,
    Function,
    PythonSources,
    dotted_name,
)

ABSENT = "absent"
"""The shape of what is not there."""

_TOLD = ("classmethod", "staticmethod", "property", "abstractmethod", "cached_property")


def shape_of(source: PythonSources, path: str) -> str:
    """The signature of a function, the bases of a class, the annotation of a field."""
    found = source.find(path)
    if found is None:
        owner = source.find(path.rpartition(".")[0])
        if path.endswith(".__init__") and owner and isinstance(owner.node, ast.ClassDef):
            return f"def ({', '.join(['self', *_fields_as_parameters(source, owner)])})"
        return ABSENT
    node = found.node
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, Function):
        return _function(node)
    if isinstance(node, ast.ClassDef):
        return _class(source, found)
    if "." not in found.name:
        return "variable"
    if isinstance(node, ast.AnnAssign):
        return f"field: {_annotation(node.annotation)}"
    return "attribute"


def body_of(source: PythonSources, path: str) -> str:
    """A digest of how something is done."""
    found = source.find(path)
    if found is None:
        return ABSENT
    return f"source {hashlib.sha256(source.text_of(found).encode()).hexdigest()[:16]}"


def parameters_of(source: PythonSources, path: str) -> ast.arguments | None:
    """Of a function, or of a class that is called; None where they cannot be told."""
    found = source.find(path)
    if found is not None and isinstance(found.node, Function):
        return found.node.args
    shape = shape_of(source, path)
    if not shape.startswith("def ("):
        return None
    statement = ast.parse(f"{shape.replace('def (', 'def f(', 1)}: ...").body[0]
    assert isinstance(statement, Function)
    return statement.args


def decorators_of(node: ast.AST) -> set[str]:
    names = set()
    for each in getattr(node, "decorator_list", []):
        name = dotted_name(each.func if isinstance(each, ast.Call) else each)
        names.add(name.rpartition(".")[2])
    return names


def _function(node: Function) -> str:
    told = [name for name in _TOLD if name in decorators_of(node)]
    if isinstance(node, ast.AsyncFunctionDef):
        told.append("async")
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, Function)
    for each in ast.walk(arguments.args):
        if isinstance(each, ast.arg) and each.annotation is not None:
            each.annotation = ast.Name(_annotation(each.annotation))
    text = f"def ({ast.unparse(arguments.args)})"
    if node.returns is not None:
        text += f" -> {_annotation(node.returns)}"
    return " ".join([*told, text])


def _class(source: PythonSources, owner: Definition) -> str:
    node = owner.node
    assert isinstance(node, ast.ClassDef)
    told = sorted(decorators_of(node) & {"dataclass", "config"})
    bases = ", ".join([ast.unparse(each) for each in node.bases])
    text = " ".join([*told, f"class ({bases})"])
    abstract: set[str] = set()
    for each in reversed(source.with_bases(owner)):
        for name, found in source.own_members(each).items():
            if isinstance(found.node, Function) and "abstractmethod" in decorators_of(found.node):
                abstract.add(name)
            else:
                abstract.discard(name)
    return f"{text} abstract: {', '.join(sorted(abstract))}" if abstract else text


def _fields_as_parameters(source: PythonSources, owner: Definition) -> list[str]:
    """Of a class without ``__init__``, such as a dataclass: the last bases' come first."""
    if _is_plain(source, owner):
        return []
    fields: dict[str, tuple[bool, str]] = {}
    for each in reversed(source.with_bases(owner)):
        for name, found in source.own_members(each).items():
            node = found.node
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            text = _annotation(node.annotation)
            if not text.startswith("ClassVar"):
                fields[name] = (node.value is not None, f"{name}: {text}")
    # in whatever order they come, those with defaults can be left out
    return [
        text + (" = ..." if has_default else "")
        for has_default, text in sorted(fields.values(), key=lambda each: each[0])
    ]


def _is_plain(source: PythonSources, owner: Definition) -> bool:
    """Whether no decorator, and no base from elsewhere, can make parameters of its fields."""
    for each in source.with_bases(owner):
        assert isinstance(each.node, ast.ClassDef)
        names = [dotted_name(base) for base in each.node.bases]
        if each.node.decorator_list or not all(
            name and source.name_in(each.module, name) for name in names
        ):
            return False
    return True


def _annotation(node: ast.expr) -> str:
    """Its text; quotes make no difference."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    return ast.unparse(node)
