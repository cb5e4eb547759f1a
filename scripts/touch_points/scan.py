# SPDX-License-Identifier: Apache-2.0
"""Walks through vllm-relay's sources and notes where they depend on vLLM's."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from touch_points.findings import Call, Replacement, Scan
from touch_points.hints import hinted
from touch_points.inheritance import OURS, THEIRS, Inheritance, is_theirs
from touch_points.values import (
    CONTAINERS,
    TypeReader,
    Value,
    Values,
    container_method,
    elements,
    instances,
    item_of,
)
from vllm_relay.vllm_changes.contract.python_sources import (
    Function,
    PythonSources,
    assigned,
    dotted_name,
)
from vllm_relay.vllm_changes.contract.shapes import decorators_of

_NOT_PATHS = re.compile(r"vllm\.(relay|\w+_plugins)$")  # a logger, and groups of entry points
_PATH = re.compile(r"vllm(\.\w+)+")
_MENTIONS = re.compile(
    r"\bvllm\b|\b(request|scheduler|worker|engine|llm|vllm_config|kv_cache_\w+|engine_core)\b"
)
_PASSES = 4
"""In each, more is learnt of what our own attributes stand for; chains of them are short."""
_OF_PYTHON = {"_asdict", "_replace", "name", "value", "add_note"}


def scan(vllm: Path, ours: Path) -> Scan:
    """Scan the package in the folder `ours` beside the vLLM in the folder `vllm`."""
    sources = PythonSources({THEIRS: vllm, OURS: ours})
    attributes: dict[tuple[str, str], Values] = {}
    wrapped: dict[tuple[str, int], Values] = {}
    trees: dict[str, ast.Module] = {}
    for path in sorted(ours.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _MENTIONS.search(text):
            file = f"{OURS}/{path.relative_to(ours).as_posix()}"
            trees[file] = ast.parse(text)
    for _ in range(_PASSES):
        known, found = dict(attributes), Scan()
        for file, tree in trees.items():
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            _ModuleScan(sources, found, file, module, attributes, wrapped).run(tree)
        if attributes == known:
            break
    found.unknown = {path: files for path, files in found.unknown.items() if not found.adds(path)}
    return found


class _ModuleScan:
    def __init__(
        self,
        sources: PythonSources,
        found: Scan,
        file: str,
        module: str,
        attributes: dict[tuple[str, str], Values],
        wrapped: dict[tuple[str, int], Values],
    ) -> None:
        self.sources = sources
        self.types = TypeReader(sources)
        self.inheritance = Inheritance(sources)
        self.found = found
        self.file = file
        self.module = module
        self.attributes = attributes
        self.wrapped = wrapped
        self.scopes: list[dict[str, Values]] = [{}]
        self.class_path = ""
        self.strings: dict[str, str] = {}

    def run(self, tree: ast.Module) -> None:
        for node in _imports(tree):
            self._import(node)
        self._statements(tree.body)

    # -- what names stand for

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for each in node.names:
            if isinstance(node, ast.Import):
                if is_theirs(each.name):
                    self._note(each.name, "imported")
                    name = each.name if each.asname else THEIRS
                    self.scopes[0][each.asname or THEIRS] = (Value("itself", name),)
                continue
            if node.level or not node.module:
                continue
            path = f"{node.module}.{each.name}"
            if is_theirs(path):
                self._note(path, "imported")
            found = self.sources.find(path)
            if found is not None:
                values = self.types.of_definition(found)
                self.scopes[0][each.asname or each.name] = values

    def _name(self, name: str) -> Values:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        found = self.sources.name_in(self.module, name)
        return self.types.of_definition(found) if found else ()

    def _hint(self, name: str) -> Values:
        is_class = name.endswith("_cls")
        return tuple(
            Value("itself" if is_class else "instance", self._canonical(path))
            for path in hinted(self.file, name)
        )

    def _canonical(self, path: str) -> str:
        found = self.sources.find(path)
        if found is None:
            self.found.unknown.setdefault(path, set()).add("scripts/touch_points/hints.py")
            return path
        return found.path

    def _annotated(self, annotation: ast.expr | None, name: str) -> Values:
        if annotation is not None:
            self._eval_annotation(annotation)
            known = self.types.annotated(annotation, self.module) or self._local_type(annotation)
            if known:
                return known
        return self._hint(name)

    def _local_type(self, annotation: ast.expr) -> Values:
        """Of a name that is imported in a function, or for type checking."""
        if isinstance(annotation, ast.BinOp):
            return self._local_type(annotation.left) + self._local_type(annotation.right)
        return tuple(
            Value("instance", each.path)
            for part in (annotation,)
            if isinstance(part, ast.Name)
            for each in self._name(part.id)
            if each.kind == "itself"
        )

    def _eval_annotation(self, annotation: ast.expr) -> None:
        for part in ast.walk(annotation):
            if isinstance(part, ast.Attribute):
                self._eval(part)

    # -- notes

    def _note(self, path: str, how: str) -> None:
        self.found.note(path, self.file, how)

    def _use(self, owner: Value, name: str, how: str) -> str | None:
        """Notes the use of an attribute; returns its path in vLLM."""
        path = self.inheritance.path_of(owner.path, name)
        if path is not None:
            self._note(path, how)
        return path

    def _attribute(self, owners: Values, name: str, how: str) -> Values:
        values: Values = ()
        is_known = not any(is_theirs(each.path) for each in owners)
        for each in self.inheritance.narrowed(owners, name):
            if each.kind not in ("instance", "itself"):
                is_known = True
                continue
            path = self._use(each, name, how)
            own = self._own_attribute(each.path, name)
            is_known = (
                is_known or path is not None or own is not None or self.inheritance.is_open(each)
            )
            values += own or self.types.attribute(each, name)
        if not is_known and name not in _OF_PYTHON and not name.startswith(("__", "relay_")):
            paths = "|".join(each.path for each in owners)
            self.found.unknown.setdefault(f"{paths}.{name}", set()).add(self.file)
        return tuple(dict.fromkeys(values))

    def _own_attribute(self, owner: str, name: str) -> Values | None:
        found = self.sources.find(owner)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        for each in self.sources.with_bases(found):
            if (each.path, name) in self.attributes:
                return self.attributes[each.path, name]
        return None

    # -- statements

    def _statements(self, body: list[ast.stmt]) -> None:
        for each in body:
            self._statement(each)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, Function):
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._assign(node)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._bind(node.target, elements(self._eval(node.iter)))
            self._statements([*node.body, *node.orelse])
        else:
            for _, value in ast.iter_fields(node):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.stmt):
                        self._statement(each)
                    elif isinstance(each, ast.expr):
                        self._eval(each)
                    elif isinstance(each, ast.withitem):
                        values = self._eval(each.context_expr)
                        if each.optional_vars is not None:
                            self._bind(each.optional_vars, values)
                    elif isinstance(each, ast.ExceptHandler | ast.match_case):
                        if isinstance(each, ast.ExceptHandler) and each.type:
                            values = self._eval(each.type)
                            if each.name:
                                self.scopes[-1][each.name] = instances(values)
                        self._statements(each.body)

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        values = self._eval(node.value) if node.value is not None else ()
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else ""
            name = node.target.id if isinstance(node.target, ast.Name) else name
            values = self._annotated(node.annotation, "") or values or self._hint(name)
            self._bind(node.target, values)
            return
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for target in assigned(node):
                self.strings[dotted_name(target)] = node.value.value
        if isinstance(node.value, ast.JoinedStr):
            for target in assigned(node):
                self.strings[dotted_name(target)] = self._joined(node.value)
        for each in node.targets:
            self._bind(each, values)

    def _bind(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = values or self._hint(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            for number, each in enumerate(target.elts):
                if isinstance(each, ast.Starred):
                    self._bind(each.value, ())
                else:
                    self._bind(each, item_of(values, number))
        elif isinstance(target, ast.Attribute):
            self._bind_attribute(target, values)
        elif isinstance(target, ast.Subscript):
            self._eval(target.value)
            self._eval(target.slice)

    def _bind_attribute(self, target: ast.Attribute, values: Values) -> None:
        for owner in self._eval(target.value):
            if owner.kind not in ("instance", "itself"):
                continue
            if is_theirs(owner.path):
                self._replace(owner.path, target.attr, values)
            elif isinstance(target.value, ast.Name) and self.class_path:
                known = self.attributes.get((owner.path, target.attr), ())
                values = values or self._hint(target.attr.lstrip("_"))
                merged = tuple(dict.fromkeys(known + values))
                self.attributes[owner.path, target.attr] = merged
                self._defines(owner.path, target.attr)

    def _replace(self, owner: str, name: str, values: Values) -> None:
        """An attribute of an object of vLLM's is set."""
        if name.startswith("__"):
            return
        is_theirs = self.sources.find(f"{owner}.{name}") is not None
        self._note(f"{owner}.{name}", "replaced" if is_theirs else "added")
        self.attributes.setdefault((owner, name), values)
        for each in values:
            found = self.sources.find(each.path) if each.kind == "itself" else None
            if is_theirs and found is not None and isinstance(found.node, Function):
                self._replacement(f"{owner}.{name}", found.node, [name, f"_{name}"])

    def _defines(self, ours: str, name: str) -> None:
        """A class of ours that extends one of vLLM's defines something."""
        found = self.sources.find(ours)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return
        bases = [each for each in self.sources.with_bases(found) if is_theirs(each.path)]
        theirs = [each for each in bases if self.sources.member(each, name) is not None]
        if theirs:
            self._note(f"{theirs[0].path}.{name}", "overridden")
        elif bases and not name.startswith("__"):
            self._note(f"{bases[0].path}.{name}", "added")

    def _replacement(
        self, path: str, node: Function, originals: list[str], is_of_ours: bool = False
    ) -> None:
        """Args: is_of_ours: what it overrides, and may call, is itself ours."""
        passes_on = False
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                called = each.func
                name = dotted_name(called)
                is_super = (
                    isinstance(called, ast.Attribute)
                    and isinstance(called.value, ast.Call)
                    and dotted_name(called.value.func) == "super"
                    and called.attr == node.name
                )
                passes_on |= is_super or name == "original"
                passes_on |= name.rpartition(".")[2] in originals and name.startswith("self.")
        passes_on = passes_on and not is_of_ours
        known = Replacement(self.file, path, node, passes_on)
        if known not in self.found.replacements:
            self.found.replacements.append(known)
        theirs = self.sources.find(path)
        if not (passes_on or is_of_ours) and theirs and _does_something(theirs.node):
            self.found.bodies.setdefault(path, {})[self.file] = "done anew"

    def _class(self, node: ast.ClassDef) -> None:
        for each in [*node.bases, *node.decorator_list, *[k.value for k in node.keywords]]:
            for value in self._eval(each):
                if each in node.bases and is_theirs(value.path):
                    self._note(value.path, "subclassed")
        outer, self.class_path = self.class_path, f"{self.module}.{node.name}"
        found = self.sources.find(self.class_path)
        if found is not None:
            for name, member in self.sources.own_members(found).items():
                self._defines(self.class_path, name)
                base = self.inheritance.their_base_above(found.path, name)
                if isinstance(member.node, Function) and base:
                    above = self.sources.with_bases(found)[1:]
                    nearest = next(each for each in above if name in self.sources.own_members(each))
                    is_of_ours = not is_theirs(nearest.path)
                    self._replacement(f"{base}.{name}", member.node, [], is_of_ours)
        self.scopes.append({})
        self._statements(node.body)
        self.scopes.pop()
        self.class_path = outer

    def _function(self, node: Function) -> None:
        for each in [*node.args.defaults, *node.args.kw_defaults, *node.decorator_list]:
            if each is not None:
                self._eval(each)
        if node.returns is not None:
            self._eval_annotation(node.returns)
        found = self.sources.name_in(self.module, node.name)
        if len(self.scopes) == 1 and found is not None:
            self.scopes[0][node.name] = (Value("itself", found.path),)
        with self._scope():
            arguments = [*node.args.posonlyargs, *node.args.args]
            for parameter in [*arguments, *node.args.kwonlyargs]:
                values = self._annotated(parameter.annotation, parameter.arg)
                self.scopes[-1][parameter.arg] = values
            decorators = {dotted_name(each) for each in node.decorator_list}
            if arguments and "staticmethod" not in decorators:
                first = arguments[0].arg
                is_cls = "classmethod" in decorators or first == "cls"
                owners = self.wrapped.get((self.file, node.lineno), ())
                if owners and first in ("self", "cls"):
                    self.scopes[-1][first] = owners if is_cls else instances(owners)
                elif self.class_path and first in ("self", "cls") and len(self.scopes) == 3:
                    own = Value("itself" if is_cls else "instance", self.class_path)
                    self.scopes[-1][first] = (own,)
            self._wraps_in(node)
            self._statements(node.body)

    def _wraps_in(self, node: Function) -> None:
        """Calls of ``wrap(owner, name, make)``: the functions in `make` take the place of
        `owner.name`."""
        if "wrap" not in self.scopes[0]:
            return
        makers = {each.name: each for each in node.body if isinstance(each, Function)}
        for each in ast.walk(node):
            if not isinstance(each, ast.Call) or dotted_name(each.func) != "wrap":
                continue
            owners, name, made = each.args[0], each.args[1], each.args[2]
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                continue
            maker = makers.get(dotted_name(made.func if isinstance(made, ast.Call) else made))
            for statement in node.body:  # completion, chat = OpenAIServingCompletion, ...
                if isinstance(statement, ast.Assign):
                    self._assign(statement)
            values = self._eval(owners)
            for value in values:
                if is_theirs(value.path):
                    self._note(f"{value.path}.{name.value}", "wrapped")
            for inner in ast.walk(maker) if maker is not None else ():
                if isinstance(inner, Function) and inner is not maker and not _makes(inner):
                    self.wrapped[self.file, inner.lineno] = values
                    for value in values:
                        self._replacement(f"{value.path}.{name.value}", inner, [])

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self.scopes.append({})
        yield
        self.scopes.pop()

    # -- expressions

    def _eval(self, node: ast.expr, how: str = "read") -> Values:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._eval(node.value), node.attr, how)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                self._string(node.value)
            return ()
        if isinstance(node, ast.JoinedStr):
            self._string(self._joined(node))
        if isinstance(node, ast.Lambda):
            with self._scope():
                for each in node.args.args:
                    self.scopes[-1][each.arg] = self._hint(each.arg)
                self._eval(node.body)
            return ()
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node)
        if isinstance(node, ast.NamedExpr):
            values = self._eval(node.value)
            self._bind(node.target, values)
            return values
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.IfExp):
            self._eval(node.test)
            return self._eval(node.body) + self._eval(node.orelse)
        if isinstance(node, ast.Await | ast.Starred):
            return self._eval(node.value)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = tuple(self._eval(each) for each in node.elts)
            if isinstance(node, ast.Tuple):
                return (Value("tuple", items=items),)
            return (Value("sequence", items=(sum(items, ()),)),)
        inner: Values = ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                inner += self._eval(child)
        return inner if isinstance(node, ast.BoolOp) else ()

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Values:
        with self._scope():
            for each in node.generators:
                self._bind(each.target, elements(self._eval(each.iter)))
                for condition in each.ifs:
                    self._eval(condition)
            if isinstance(node, ast.DictComp):
                return (Value("mapping", items=(self._eval(node.key), self._eval(node.value))),)
            return (Value("sequence", items=(self._eval(node.elt),)),)

    def _subscript(self, node: ast.Subscript) -> Values:
        owners = self._eval(node.value)
        self._eval(node.slice)
        if isinstance(node.slice, ast.Slice):
            return owners
        found: Values = tuple(each for each in owners if each.kind == "itself")  # Base[T]
        for each in owners:
            if each.kind == "mapping":
                found += each.items[1]
            elif each.kind == "sequence":
                found += each.items[0]
            elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                found += item_of((each,), node.slice.value)
        return found

    def _call(self, node: ast.Call) -> Values:
        arguments = [self._eval(each) for each in node.args]
        for keyword in node.keywords:
            self._eval(keyword.value)
        name = dotted_name(node.func)
        if name == "super" and self.class_path:
            return self._super()
        if name in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
            return self._getattr(node, arguments[0], name)
        if name in CONTAINERS and arguments:
            return CONTAINERS[name](arguments)
        if name == "type" and len(arguments) == 1:
            return tuple(Value("itself", each.path) for each in arguments[0] if each.path)
        if isinstance(node.func, ast.Attribute):
            owners = self._eval(node.func.value)
            of_container = container_method(owners, node.func.attr)
            if of_container is not None:
                return of_container
            called = self._attribute(owners, node.func.attr, "called")
        else:
            called = self._eval(node.func)
        results: Values = ()
        for each in called:
            if each.kind == "itself":
                results += self._called(each.path, node)
        return tuple(dict.fromkeys(results))

    def _called(self, path: str, node: ast.Call) -> Values:
        found = self.sources.find(path)
        if found is not None and isinstance(found.node, ast.ClassDef):
            init = self.sources.find(f"{path}.__init__")
            if is_theirs(path):
                self._note(f"{path}.__init__", "called")
                self.found.calls.append(Call(self.file, f"{path}.__init__", node))
            elif init is not None and is_theirs(init.path):
                self.found.calls.append(Call(self.file, init.path, node))
            return (Value("instance", found.path),)
        if is_theirs(path):
            self.found.calls.append(Call(self.file, path, node))
            if "." not in (found.name if found else "."):
                self._note(path, "called")
        return self.types.returned(path)

    def _super(self) -> Values:
        found = self.sources.find(self.class_path)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return ()
        return tuple(Value("instance", each.path) for each in self.sources.with_bases(found)[1:2])

    def _getattr(self, node: ast.Call, owners: Values, function: str) -> Values:
        name = node.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            return ()
        if function == "setattr":
            for each in owners:
                if is_theirs(each.path):
                    self._replace(each.path, name.value, self._eval(node.args[2]))
            return ()
        values: Values = ()
        for each in owners:  # absent ones have a default
            if each.kind in ("instance", "itself"):
                self._use(each, name.value, "read")
                values += self._own_attribute(each.path, name.value) or self.types.attribute(
                    each, name.value
                )
        return values

    # -- strings

    def _string(self, text: str) -> None:
        if _PATH.fullmatch(text) and not _NOT_PATHS.match(text):
            self._note(text, "named")
        elif "\n" in text and "vllm" in text and "import " in text:
            try:
                tree = ast.parse(text)
            except SyntaxError:
                return  # words
            inner = _ModuleScan(
                self.sources, self.found, self.file, self.module, self.attributes, self.wrapped
            )
            inner.run(tree)

    def _joined(self, node: ast.JoinedStr) -> str:
        parts = []
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self._eval(each.value)
                parts.append(self.strings.get(dotted_name(each.value), "{}"))
            elif isinstance(each, ast.Constant):
                parts.append(str(each.value))
        return "".join(parts)


@functools.cache
def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _does_something(node: ast.AST) -> bool:
    """Whether a function does more than return what it returns, pass, or raise."""
    if not isinstance(node, Function) or "abstractmethod" in decorators_of(node):
        return False
    last = node.body[-1]
    is_told = len(node.body) == 1 or ast.get_docstring(node) is not None and len(node.body) == 2
    return not (is_told and isinstance(last, ast.Return | ast.Pass | ast.Raise | ast.Expr))


def _makes(node: Function) -> bool:
    """Whether it is given the function to replace, and so is no replacement itself."""
    return any(each.arg == "original" for each in node.args.args)
