# SPDX-License-Identifier: Apache-2.0
"""What an expression may stand for, as far as the sources of vLLM and vllm-relay tell."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from vllm_relay.vllm_changes.contract.python_sources import (
    Definition,
    Function,
    PythonSources,
    dotted_name,
)

_SEQUENCES = {
    "list", "tuple", "set", "frozenset", "deque", "Sequence", "Iterable", "Iterator", "Collection",
    "Set", "List", "Generator", "AsyncGenerator", "AsyncIterator", "KeysView",
}  # fmt: skip
_MAPPINGS = {"dict", "Mapping", "defaultdict", "MutableMapping", "OrderedDict", "Dict"}


@dataclass(frozen=True)
class Value:
    """One thing that an expression may stand for.

    Attributes:
        kind: an instance of what is named, or that itself: a class, function or module.
        path: of vLLM's class, function or module, or of ours; "" in containers.
        items: in containers, what they hold: [element], [key, value] or one each of a tuple.
    """

    kind: Literal["instance", "itself", "sequence", "mapping", "tuple"]
    path: str = ""
    items: tuple[tuple[Value, ...], ...] = ()


Values = tuple[Value, ...]
"""Alternatives; none: unknown."""


def elements(values: Values) -> Values:
    """What iterating over it gives."""
    found: Values = ()
    for each in values:
        if each.kind in ("sequence", "mapping"):
            found += each.items[0]
        elif each.kind == "tuple":
            found += sum(each.items, ())
    return tuple(dict.fromkeys(found))


def instances(values: Values) -> Values:
    return tuple(Value("instance", each.path) for each in values if each.path)


def item_of(values: Values, number: int) -> Values:
    found: Values = ()
    for each in values:
        if each.kind == "tuple" and -1 <= number < len(each.items):
            found += each.items[number]
        elif each.kind == "sequence":
            found += each.items[0]
    return found


def container_method(owners: Values, name: str) -> Values | None:
    containers = [each for each in owners if each.kind in ("mapping", "sequence", "tuple")]
    if not containers:
        return None
    found: Values = ()
    for each in containers:
        if each.kind == "mapping":
            key, value = each.items
            if name == "items":
                found += (Value("sequence", items=((Value("tuple", items=each.items),),)),)
            elif name in ("values", "keys"):
                found += (Value("sequence", items=(value if name == "values" else key,)),)
            elif name in ("get", "pop", "setdefault"):
                found += value
        elif name in ("pop", "popleft"):
            found += elements((each,))
        elif name == "copy":
            found += (each,)
    return found


def _sequence(arguments: list[Values]) -> Values:
    return (Value("sequence", items=(elements(arguments[0]),)),)


def _zipped(arguments: list[Values]) -> Values:
    rows = Value("tuple", items=tuple(elements(each) for each in arguments))
    return (Value("sequence", items=((rows,),)),)


CONTAINERS = {
    **dict.fromkeys(
        ("list", "tuple", "set", "sorted", "reversed", "iter", "frozenset", "islice"), _sequence
    ),
    "zip": _zipped,
    "enumerate": lambda arguments: _zipped([(), arguments[0]]),
    "next": lambda arguments: elements(arguments[0]),
    "min": lambda arguments: elements(arguments[0]),
    "max": lambda arguments: elements(arguments[0]),
    "replace": lambda arguments: arguments[0],
    "cast": lambda arguments: arguments[-1],
    "chain.from_iterable": lambda arguments: _sequence([elements(arguments[0])]),
}


class TypeReader:
    """Reads the types of one package."""

    def __init__(self, source: PythonSources) -> None:
        self.source = source
        self._reading: set[str] = set()

    def annotated(self, annotation: ast.expr | None, module: str) -> Values:
        """What a name with such an annotation stands for."""
        if annotation is None:
            return ()
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return ()
        if isinstance(annotation, ast.BinOp):
            return self.annotated(annotation.left, module) + self.annotated(
                annotation.right, module
            )
        if isinstance(annotation, ast.Subscript):
            return self._subscripted(annotation, module)
        if (name := dotted_name(annotation)) in _MAPPINGS:
            return (Value("mapping", items=((), ())),)
        if name in _SEQUENCES:
            return (Value("sequence", items=((),)),)
        return self.instance_of(annotation, module)

    def instance_of(self, expression: ast.expr, module: str) -> Values:
        found = self.source.name_in(module, dotted_name(expression))
        if found is None:
            return ()
        if isinstance(found.node, ast.ClassDef):
            return (Value("instance", found.path),)
        if isinstance(found.node, ast.Assign):  # an alias of types
            return self.annotated(found.node.value, found.module)
        return ()

    def _subscripted(self, annotation: ast.Subscript, module: str) -> Values:
        name = dotted_name(annotation.value).rpartition(".")[2]
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name in ("Optional", "ClassVar", "Annotated", "Awaitable", "Final", "Required"):
            return self.annotated(parts[0], module)
        if name == "Union":
            return sum((self.annotated(each, module) for each in parts), ())
        if name in ("type", "Type"):
            return tuple(Value("itself", each.path) for each in self.annotated(parts[0], module))
        if name in ("tuple", "Tuple") and not _is_ellipsis(parts[-1]):
            return (Value("tuple", items=tuple(self.annotated(each, module) for each in parts)),)
        if name in _MAPPINGS and len(parts) == 2:
            return (Value("mapping", items=tuple(self.annotated(each, module) for each in parts)),)
        if name in _SEQUENCES:
            return (Value("sequence", items=(self.annotated(parts[0], module),)),)
        return self.instance_of(annotation.value, module)

    def attribute(self, owner: Value, name: str) -> Values:
        """What an attribute of a class, an instance or a module stands for."""
        found = self.source.find(f"{owner.path}.{name}")
        return () if found is None else self.of_definition(found)

    def of_definition(self, found: Definition) -> Values:
        node = found.node
        if isinstance(node, ast.ClassDef | ast.Module):
            return (Value("itself", found.path),)
        if isinstance(node, Function):
            if _is_property(node):
                return self.annotated(node.returns, found.module)
            return (Value("itself", found.path),)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation, found.module)
        if isinstance(node, ast.Assign) and found.path not in self._reading:
            self._reading.add(found.path)
            try:
                return self._of_expression(node.value, found)
            finally:
                self._reading.discard(found.path)
        return ()

    def returned(self, path: str) -> Values:
        """What calling it gives."""
        found = self.source.find(path)
        if found is None:
            return ()
        if isinstance(found.node, ast.ClassDef):
            return (Value("instance", found.path),)
        if isinstance(found.node, Function):
            owner = found.path.rpartition(".")[0]
            if dotted_name(found.node.returns or ast.Constant(0)) == "Self":
                return (Value("instance", owner),)
            return self.annotated(found.node.returns, found.module)
        return ()

    def _of_expression(self, value: ast.expr, found: Definition) -> Values:
        """What is assigned to an attribute of `self`, or to a global name."""
        if isinstance(value, ast.Call):
            called = self.source.name_in(found.module, dotted_name(value.func))
            if called is not None:
                return self.returned(called.path)
            if dotted_name(value.func) in ("tuple", "list") and value.args:
                return self._of_expression(value.args[0], found)
        if isinstance(value, ast.GeneratorExp | ast.ListComp):
            return (Value("sequence", items=(self._of_expression(value.elt, found),)),)
        if isinstance(value, ast.IfExp):
            return self._of_expression(value.body, found) + self._of_expression(value.orelse, found)
        name = dotted_name(value)
        if name.startswith("self.") and (owner := self._class_of(found)):
            values: Values = (Value("instance", owner),)
            for part in name.split(".")[1:]:
                values = sum((self.attribute(each, part) for each in values), ())
            return values
        if isinstance(value, ast.Name):
            return self._parameter(value.id, found)
        return ()

    def _parameter(self, name: str, found: Definition) -> Values:
        """Of the ``__init__`` that assigns it."""
        owner = self._class_of(found)
        init = self.source.find(f"{owner}.__init__") if owner else None
        if init is None or not isinstance(init.node, Function):
            return ()
        arguments = init.node.args
        for each in [*arguments.args, *arguments.kwonlyargs]:
            if each.arg == name:
                return self.annotated(each.annotation, init.module)
        return ()

    def _class_of(self, found: Definition) -> str | None:
        return found.path.rpartition(".")[0] if "." in found.name else None


def _is_property(node: Function) -> bool:
    names = {dotted_name(each).rpartition(".")[2] for each in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...
