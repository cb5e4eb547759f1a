# SPDX-License-Identifier: Apache-2.0
"""What is defined where in packages, read from their sources without importing any of them.

Names are followed as Python follows them: through imports, re-exports and base classes. What only
exists at run time, such as attributes made by ``setattr``, is not found.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """What a name stands for.

    Attributes:
        module: dotted name of the module that defines it.
        name: its name in there; with the class, for what a class defines; "" for the module itself.
        node: that defines it: a module, class, function or assignment.
    """

    module: str
    name: str
    node: ast.AST

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class PythonSources:
    """The sources of some packages; of all others nothing is known.

    Args:
        folders: the folder with ``__init__.py`` of each package.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self._modules: dict[str, _Module | None] = {}
        self._members: dict[str, dict[str, Definition]] = {}
        self._found: dict[str, Definition | None] = {}
        self._depth = 0  # of re-exports that are being followed
        self._bases: dict[str, list[Definition]] = {}

    def find(self, path: str) -> Definition | None:
        """What a dotted path stands for; the last part may be what a class inherits."""
        if path not in self._found:
            owner, _, name = path.rpartition(".")
            if not owner:
                self._found[path] = self._module_itself(path)
            else:
                above = self.find(owner)
                found = above and self._part_of(above, name)
                if self._depth:  # cut short by a circle of imports, perhaps
                    return found
                self._found[path] = found
        return self._found[path]

    def name_in(self, module: str, dotted: str) -> Definition | None:
        """What a name, perhaps with dots, stands for in a module."""
        first, *rest = dotted.split(".")
        found = self._global(module, first)
        for part in rest:
            found = found and self._part_of(found, part)
        return found

    def member(self, owner: Definition, name: str) -> Definition | None:
        """What a class, or one of its bases, defines under a name: methods, fields, and what its
        methods assign to attributes of ``self``."""
        for each in self.with_bases(owner):
            found = self._own_members(each).get(name)
            if found is not None:
                return found
        return None

    def with_bases(self, owner: Definition) -> list[Definition]:
        """A class, and those of its bases that these packages define, nearest first."""
        if owner.path in self._bases:
            return self._bases[owner.path]
        classes = {owner.path: owner}
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            name = dotted_name(base.value if isinstance(base, ast.Subscript) else base)
            found = self.name_in(owner.module, name) if name else None
            if found is not None and isinstance(found.node, ast.ClassDef):
                classes |= {each.path: each for each in self.with_bases(found)}
        self._bases[owner.path] = list(classes.values())
        return self._bases[owner.path]

    def own_members(self, owner: Definition) -> dict[str, Definition]:
        """What a class itself defines, by name."""
        return dict(self._own_members(owner))

    def text_of(self, found: Definition) -> str:
        """The source of a definition without comments, white space and its docstring."""
        module = self._module(found.module)
        assert module is not None
        skipped: set[int] = set()
        node = found.node
        if isinstance(node, ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            skipped = set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(module.lines))
        lines = ((number, module.lines[number - 1].strip()) for number in range(first, last + 1))
        return "\n".join(
            text for number, text in lines if text and text[0] != "#" and number not in skipped
        )

    def _part_of(self, owner: Definition, name: str) -> Definition | None:
        if isinstance(owner.node, ast.ClassDef):
            return self.member(owner, name)
        return self._global(owner.module, name) if isinstance(owner.node, ast.Module) else None

    def _global(self, module_name: str, name: str) -> Definition | None:
        module = self._module(module_name)
        if module is None:
            return None
        node = module.names.get(name)
        if node is None:
            return self._module_itself(f"{module_name}.{name}")
        if not isinstance(node, _Import):
            return Definition(module_name, name, node)
        module.names[name] = _Import("", "")  # a circle of imports ends here
        self._depth += 1
        try:
            if node.module == module_name:  # from . import name
                return self._module_itself(f"{module_name}.{node.name}")
            return self.find(f"{node.module}.{node.name}" if node.name else node.module)
        finally:
            self._depth -= 1
            module.names[name] = node

    def _module_itself(self, name: str) -> Definition | None:
        module = self._module(name)
        return None if module is None else Definition(name, "", module.tree)

    def _own_members(self, owner: Definition) -> dict[str, Definition]:
        if owner.path not in self._members:
            assert isinstance(owner.node, ast.ClassDef)
            self._members[owner.path] = {
                name: Definition(owner.module, f"{owner.name}.{name}", node)
                for name, node in _members_of(owner.node).items()
            }
        return self._members[owner.path]

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            package, *parts = name.split(".")
            self._modules[name] = None
            if package in self.folders:
                base = self.folders[package].joinpath(*parts)
                for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
                    if file.is_file():
                        self._modules[name] = _Module(name, file, file.name == "__init__.py")
                        break
        return self._modules[name]


@dataclass(frozen=True)
class _Import:
    """A name that is imported.

    Attributes:
        name: in its module; "" where the module itself is meant.
    """

    module: str
    name: str


class _Module:
    def __init__(self, name: str, file: Path, is_package: bool) -> None:
        text = file.read_text(encoding="utf-8")
        self.tree = ast.parse(text)
        self.lines = text.splitlines()
        self.names: dict[str, ast.AST | _Import] = {}
        package = name if is_package else name.rpartition(".")[0]
        for statement in _statements(self.tree.body):
            for defined, node in _definitions(statement, package).items():
                known = self.names.get(defined)
                if known is None or _is_overload(known):
                    self.names[defined] = node


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those in branches, which of them is run or not."""
    for each in body:
        yield each
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(each, ast.If | ast.Try | ast.With):
                for inner in getattr(each, name, []):
                    yield from _statements(getattr(inner, "body", [inner]))


def _definitions(statement: ast.stmt, package: str) -> dict[str, ast.AST | _Import]:
    if isinstance(statement, ast.ClassDef | Function):
        return {statement.name: statement}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {each.id: statement for each in targets if isinstance(each, ast.Name)}
    if isinstance(statement, ast.Import):
        return {
            each.asname or each.name.split(".")[0]: _Import(
                each.name if each.asname else each.name.split(".")[0], ""
            )
            for each in statement.names
        }
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        if statement.level:
            above = package.split(".")[: len(package.split(".")) - statement.level + 1]
            module = ".".join([*above, module] if module else above)
        return {each.asname or each.name: _Import(module, each.name) for each in statement.names}
    return {}


def _members_of(class_node: ast.ClassDef) -> dict[str, ast.AST]:
    members: dict[str, ast.AST] = {}
    for statement in _statements(class_node.body):
        for name, node in _definitions(statement, "").items():
            known = members.get(name)
            if not isinstance(node, _Import) and (known is None or _is_overload(known)):
                members[name] = node
    for method in class_node.body:
        if not isinstance(method, Function) or not method.args.args:
            continue
        own = method.args.args[0].arg
        for node in ast.walk(method):
            for target in assigned(node):
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == own
                ):
                    known = members.setdefault(target.attr, node)
                    if isinstance(node, ast.AnnAssign) and isinstance(known, ast.Assign):
                        members[target.attr] = node
    return members


def assigned(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    inner: list[ast.expr] = []
    for each in targets:
        inner += each.elts if isinstance(each, ast.Tuple) else [each]
    return inner


def _is_overload(node: ast.AST | _Import) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(dotted_name(each) in ("overload", "typing.overload") for each in decorators)


def dotted_name(node: ast.AST) -> str:
    """``a.b.c`` of such an expression; "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return node.value  # an annotation in quotes
    return ""


def installed_vllm() -> Path | None:
    """The folder of the vLLM that Python would import, None without one."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None
