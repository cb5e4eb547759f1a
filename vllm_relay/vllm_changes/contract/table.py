# SPDX-License-Identifier: Apache-2.0
"""The table of touch points, held against a vLLM.

``scripts/record_touch_points.py`` writes ``touch_points.json``: what is needed, by which files, and
its shape in each recorded release.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_relay.vllm_changes.contract.python_sources import Function, PythonSources
from vllm_relay.vllm_changes.contract.shapes import ABSENT, body_of, shape_of

PATH = Path(__file__).with_name("touch_points.json")

_REPLACING = {"overridden", "replaced", "wrapped"}


@dataclass(frozen=True)
class TouchPoint:
    """Something of vLLM's that vllm-relay needs.

    Attributes:
        path: where vLLM has it.
        needed_by: file of ours -> how it is used there.
        shapes: recorded release -> its shape in that release.
        is_body: whether how it is done matters, and not only what it looks like from outside.
    """

    path: str
    needed_by: Mapping[str, str]
    shapes: Mapping[str, str]
    is_body: bool = False

    def shape_in(self, source: PythonSources) -> str:
        return body_of(source, self.path) if self.is_body else shape_of(source, self.path)

    @property
    def is_replaced(self) -> bool:
        """Whether vLLM calls ours in its place."""
        return any(_REPLACING & set(how.split(", ")) for how in self.needed_by.values())


@dataclass(frozen=True)
class Difference:
    """A touch point that is not as it was recorded."""

    point: TouchPoint
    was: str
    now: str

    def __str__(self) -> str:
        who = "; ".join(f"{how} by {file}" for file, how in self.point.needed_by.items())
        return f"{self.point.path}: {self.change}; {who}"

    @property
    def change(self) -> str:
        """What changed."""
        if self.now == ABSENT:
            return "is not there any more"
        if self.was == ABSENT:
            return f"vLLM has it now, as {self.now}, and ours takes its place"
        if self.point.is_body:
            return "is done in another way"
        return _change_of_signature(self.was, self.now) or f"was {self.was}, is {self.now}"

    @property
    def is_gone(self) -> bool:
        return self.now == ABSENT

    @property
    def is_harmless(self) -> bool:
        """Whether all that changed is that callers, as we are, may give more arguments."""
        was, now = _parameters(self.was), _parameters(self.now)
        if self.point.is_replaced or was is None or now is None:
            return False
        more = now.keys() - was.keys()
        kept = {name: each for name, each in now.items() if name not in more}
        same_order = [name for name in now if name in was] == list(was)
        return kept == was and same_order and all("=" in now[name] for name in more)


@dataclass(frozen=True)
class Comparison:
    """A vLLM held against the table.

    Attributes:
        vllm_version: its version.
        release: the recorded release it was held against.
        differences: what is not as in that release.
    """

    vllm_version: str
    release: str
    num_points: int
    differences: tuple[Difference, ...]

    @property
    def is_recorded(self) -> bool:
        return _base(self.vllm_version) == _base(self.release)

    def without_harmless(self) -> Comparison:
        """Only what can make a difference to vllm-relay."""
        kept = tuple(each for each in self.differences if not each.is_harmless)
        return replace(self, differences=kept)

    def by_file(self) -> dict[str, list[Difference]]:
        """The differences for each file of ours that has to be looked at."""
        files: dict[str, list[Difference]] = {}
        for each in self.differences:
            for file in each.point.needed_by:
                files.setdefault(file, []).append(each)
        return dict(sorted(files.items()))


@dataclass(frozen=True)
class TouchPointTable:
    releases: tuple[str, ...]
    points: tuple[TouchPoint, ...]

    @classmethod
    def load(cls, path: Path = PATH) -> TouchPointTable:
        known = json.loads(path.read_text(encoding="utf-8"))
        points = []
        for kind in ("shapes", "bodies"):
            for name, entry in known[kind].items():
                shapes = {
                    release: shape
                    for shape, releases in entry["in"].items()
                    for release in releases.split(", ")
                }
                points.append(TouchPoint(name, entry["needed_by"], shapes, kind == "bodies"))
        return cls(tuple(known["releases"]), tuple(points))

    def save(self, path: Path = PATH) -> None:
        known: dict[str, object] = {"releases": list(self.releases)}
        for kind in ("shapes", "bodies"):
            known[kind] = {
                each.path: {
                    "needed_by": dict(sorted(each.needed_by.items())),
                    "in": {
                        shape: ", ".join(sorted(r for r in each.shapes if each.shapes[r] == shape))
                        for shape in dict.fromkeys(each.shapes[r] for r in sorted(each.shapes))
                    },
                }
                for each in sorted(self.points, key=lambda each: each.path)
                if each.is_body == (kind == "bodies")
            }
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")

    def compare(self, vllm_folder: Path, vllm_version: str) -> Comparison:
        """Hold the vLLM in a folder against the release it is, or against the nearest one."""
        source = PythonSources({"vllm": vllm_folder})
        release = nearest(self.releases, vllm_version)
        differences = []
        for point in self.points:
            was = point.shapes.get(release, ABSENT)
            now = point.shape_in(source)
            if now != was:
                differences.append(Difference(point, was, now))
        return Comparison(vllm_version, release, len(self.points), tuple(differences))


def nearest(releases: Iterable[str], vllm_version: str) -> str:
    """The same release, else the newest one before it, else the oldest one."""
    by_age = sorted(releases, key=Version)
    try:
        version = Version(Version(vllm_version).base_version)
    except InvalidVersion:
        return by_age[-1]
    return next((each for each in reversed(by_age) if Version(each) <= version), by_age[0])


def _base(version: str) -> str:
    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def _parameters(shape: str) -> dict[str, str] | None:
    """Name -> text of the parameters of a function; and ``return``, its decorators."""
    decorators, mark, rest = shape.partition("def (")
    if not mark:
        return None
    try:
        statement = ast.parse(f"def f({rest}: ...").body[0]
    except SyntaxError:
        return None
    assert isinstance(statement, Function)
    arguments = statement.args
    found = {"decorators": decorators.strip()}
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for each, default in [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        value = "" if default is None else f" = {ast.unparse(default)}"
        found[each.arg] = ast.unparse(each) + value
    for star, more in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if more is not None:
            found[f"{star}{more.arg}"] = f"{star}{ast.unparse(more)}"
    found["return"] = ast.unparse(statement.returns) if statement.returns else ""
    return found


def _change_of_signature(was: str, now: str) -> str:
    before, after = _parameters(was), _parameters(now)
    if before is None or after is None:
        return ""
    told = []
    for name in {**before, **after}:
        if name not in after:
            told.append(f"argument {name} is gone")
        elif name not in before:
            told.append(f"argument {after[name]} is new")
        elif before[name] != after[name]:
            what = {"return": "returned ", "decorators": "was a "}.get(name, "was ")
            then = {"return": "returns ", "decorators": "is a "}.get(name, "is ")
            told.append(f"{what}{before[name] or 'plain'}, {then}{after[name] or 'plain'}")
    if not told:
        told.append("its arguments are in another order")
    return "; ".join(told)
