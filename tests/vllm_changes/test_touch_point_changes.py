# SPDX-License-Identifier: Apache-2.0
"""What is said of a vLLM that changed: on one that is made up, and a package that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from touch_points import recording
from touch_points.recording import misfits, needed, record

from vllm_relay.vllm_changes.contract.table import TouchPointTable

VLLM = {
    "__init__.py": "if TYPE_CHECKING:\n    from vllm.queue import Queue\n",
    "config.py": """
        @dataclass
        class CacheConfig:
            block_size: int = 16

        @dataclass
        class Config:
            cache: CacheConfig
            name: str | None = None
    """,
    "queue.py": """
        from abc import ABC, abstractmethod
        from .config import Config

        class Queue(ABC):
            def __init__(self, config: Config) -> None:
                self.config = config
                self.length = 0

            @abstractmethod
            def pop(self) -> int:
                "The first one."

            def push(self, item: int, first: bool = False) -> None:
                # a comment
                self.length += 1

            def drain(self, timeout_s: float = 1.0) -> int:
                self.length = 0
                return 1
    """,
    "steps.py": "def run(step: int, *, dry: bool = False) -> int:\n    return step\n",
}
OURS = {
    "__init__.py": "",
    "ours.py": """
        from vllm import Queue

        class OurQueue(Queue):
            def pop(self) -> int:
                return self.config.cache.block_size

            def push(self, item: int, *args, **kwargs) -> None:
                super().push(item, *args, **kwargs)

            def drain(self, timeout_s: float = 1.0) -> int:
                return 0

            def peek(self) -> int:
                return self.length
    """,
    "changes.py": """
        from vllm_relay.wrapping import wrap

        def change() -> None:
            from vllm import steps

            def make(original):
                def run(step, *args, **kwargs):
                    return original(step + 1, *args, **kwargs)

                return run

            wrap(steps, "run", make)

        def use() -> int:
            from vllm.steps import run

            return run(3, dry=True)
    """,
    "wrapping.py": "def wrap(owner, name, make): ...\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        lines = text.split("\n")
        indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
        (folder / name).write_text("\n".join(line[indent:] for line in lines))
    return folder


@pytest.fixture(autouse=True)
def no_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BODIES", {})


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write(tmp_path / "vllm_relay", OURS)


@pytest.fixture
def recorded(tmp_path: Path, ours: Path) -> TouchPointTable:
    vllm = write(tmp_path / "vllm", VLLM)
    scan = needed(vllm, ours)
    assert not scan.unknown
    assert not misfits(scan, vllm, ours)
    path = tmp_path / "table.json"
    record(TouchPointTable((), ()), scan, vllm, "1.0.0").save(path)
    table = TouchPointTable.load(path)
    assert table.compare(vllm, "1.0.0").differences == ()
    return table


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "queue.py",
            "item: int, first: bool = False",
            "item: int, first: bool = False, weight: int = 0",
            "vllm.queue.Queue.push: argument weight: int = 0 is new; "
            "called, overridden by vllm_relay/ours.py",
        ),
        (
            "queue.py",
            "def pop(self) -> int:",
            "def pop(self) -> tuple[int, int]:",
            "vllm.queue.Queue.pop: returned int, returns tuple[int, int]; "
            "overridden by vllm_relay/ours.py",
        ),
        (
            "queue.py",
            "self.length = 0\n                return 1",
            "self.length = 0\n                return 2",
            "vllm.queue.Queue.drain: is done in another way; done anew by vllm_relay/ours.py",
        ),
        (
            "queue.py",
            "@abstractmethod",
            f"@abstractmethod\n{' ' * 12}def peek(self) -> int: ...\n\n{' ' * 12}@abstractmethod",
            "vllm.queue.Queue.peek: vLLM has it now, as abstractmethod def (self) -> int, and ours "
            "takes its place; added by vllm_relay/ours.py",
        ),
        (
            "config.py",
            "block_size: int = 16",
            "block_size_tokens: int = 16",
            "vllm.config.CacheConfig.block_size: is not there any more; read by vllm_relay/ours.py",
        ),
        (
            "config.py",
            "block_size: int = 16",
            "block_size: int | None = None",
            "vllm.config.CacheConfig.block_size: was field: int, is field: int | None; "
            "read by vllm_relay/ours.py",
        ),
        (
            "queue.py",
            "class Queue(ABC):",
            "class Waiting(ABC):",
            "vllm.Queue: is not there any more; imported by vllm_relay/ours.py",
        ),
        (
            "steps.py",
            "def run(step: int, *, dry: bool = False)",
            "def run(step: int, *, real: bool = True)",
            "vllm.steps.run: argument dry is gone; argument real: bool = True is "
            "new; called, imported, wrapped by vllm_relay/changes.py",
        ),
    ],
)
def test_a_change_is_told_with_who_needs_it(
    tmp_path: Path, recorded: TouchPointTable, file: str, old: str, new: str, expected: str
) -> None:
    assert old in VLLM[file]
    changed = write(tmp_path / "changed", {**VLLM, file: VLLM[file].replace(old, new)})
    found = recorded.compare(changed, "1.0.0")
    assert expected in [str(each) for each in found.differences]
    lines = found.by_file()[expected.rpartition(" ")[2]]
    assert expected in [str(each) for each in lines]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# other words"),
        ('"The first one."', '"The one that was pushed first."'),
        ("self.length += 1", "self.length = self.length + 1"),  # passed on to, whatever it does
        ("def drain(self", "def clear(self) -> None: ...\n\n            def drain(self"),
    ],
)
def test_what_nobody_needs_may_change(
    tmp_path: Path, recorded: TouchPointTable, old: str, new: str
) -> None:
    assert old in VLLM["queue.py"]
    files = {**VLLM, "queue.py": VLLM["queue.py"].replace(old, new)}
    changed = write(tmp_path / "changed", files)
    assert not recorded.compare(changed, "1.0.0").differences


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "ours.py",
            "item: int, *args, **kwargs",
            "item: int, **kwargs",
            "vllm.queue.Queue.push: arguments it does not know are not passed on; replaced by push "
            "in vllm_relay/ours.py",
        ),
        (
            "ours.py",
            "def drain(self, timeout_s: float = 1.0)",
            "def drain(self)",
            "vllm.queue.Queue.drain: gets self, timeout_s; replaced by drain in vllm_relay/ours.py "
            "takes self",
        ),
        (
            "changes.py",
            "def run(step, *args, **kwargs)",
            "def run(step)",
            "vllm.steps.run: arguments it does not know are not passed on; replaced by run in "
            "vllm_relay/changes.py",
        ),
        (
            "changes.py",
            "run(3, dry=True)",
            "run(3, quick=True)",
            "vllm.steps.run: takes no quick; called by vllm_relay/changes.py in line 18",
        ),
        (
            "changes.py",
            "run(3, dry=True)",
            "run(dry=True)",
            "vllm.steps.run: needs step; called by vllm_relay/changes.py in line 18",
        ),
        (
            "changes.py",
            "run(3, dry=True)",
            "run(3, 4)",
            "vllm.steps.run: takes 1 arguments, not 2; called by vllm_relay/changes.py in line 18",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, file: str, old: str, new: str, expected: str
) -> None:
    assert old in OURS[file]
    vllm = write(tmp_path / "vllm", VLLM)
    ours = write(tmp_path / "vllm_relay", {**OURS, file: OURS[file].replace(old, new)})
    assert misfits(needed(vllm, ours), vllm, ours) == [expected]


def test_annotations_of_a_class_that_is_no_dataclass_are_no_arguments(tmp_path: Path) -> None:
    classes = "class Command:\n    name: str\n\nclass Serve(Command):\n    name = 'serve'\n"
    vllm = write(tmp_path / "vllm", {"__init__.py": "", "cli.py": classes})
    use = "from vllm.cli import Serve\n\nServe()\n"
    ours = write(tmp_path / "vllm_relay", {"__init__.py": "", "use.py": use})
    assert misfits(needed(vllm, ours), vllm, ours) == []
    (vllm / "cli.py").write_text(f"@dataclass\n{classes}")
    assert len(misfits(needed(vllm, ours), vllm, ours)) == 1


def test_an_attribute_that_is_not_there_is_told(tmp_path: Path) -> None:
    vllm = write(tmp_path / "vllm", VLLM)
    text = OURS["ours.py"].replace("cache.block_size", "cache.num_blocks")
    found = needed(vllm, write(tmp_path / "vllm_relay", {**OURS, "ours.py": text}))
    assert found.unknown == {"vllm.config.CacheConfig.num_blocks": {"vllm_relay/ours.py"}}


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("1.0.0", "1.0.0"),
        ("1.0.1+cpu", "1.0.0"),
        ("2.5", "2.0.0"),
        ("0.9", "1.0.0"),
        ("?", "2.0.0"),
    ],
)
def test_an_unknown_release_is_held_against_the_one_before_it(
    tmp_path: Path, recorded: TouchPointTable, ours: Path, version: str, release: str
) -> None:
    vllm = tmp_path / "vllm"
    table = record(recorded, needed(vllm, ours), vllm, "2.0.0")
    assert table.releases == ("1.0.0", "2.0.0")
    found = table.compare(vllm, version)
    assert found.release == release
    assert found.is_recorded == (version == release)
    assert not found.differences


def test_a_new_argument_of_what_is_only_called_is_harmless(tmp_path: Path) -> None:
    ours = write(
        tmp_path / "vllm_relay",
        {"__init__.py": "", "use.py": "from vllm.steps import run\n\nrun(3)\n"},
    )
    vllm = write(tmp_path / "vllm", VLLM)
    table = record(TouchPointTable((), ()), needed(vllm, ours), vllm, "1.0.0")
    for number, (arguments, is_harmless) in enumerate(
        {
            "step: int, *, dry: bool = False, fast: bool = True": True,
            "step: int, *, dry: bool = False, fast: bool": False,
            "fast: int = 0, step: int = 0, *, dry: bool = False": False,
            "step: float, *, dry: bool = False": False,
        }.items()
    ):
        text = f"def run({arguments}) -> int:\n    return 3\n"
        changed = write(tmp_path / f"changed{number}", {**VLLM, "steps.py": text})
        found = table.compare(changed, "1.1.0")
        assert len(found.differences) == 1
        assert bool(found.without_harmless().differences) != is_harmless, arguments
