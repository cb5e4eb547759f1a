# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in for vLLM's own tests: relay's schedulers in place of vLLM's, outcomes to a file.

vLLM's tests are a package `tests` as well, so this module is found by PYTHONPATH and imports
nothing of ours from there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("relay")
    group.addoption("--relay-schedulers", action="store_true", help="in place of vLLM's")
    group.addoption("--outcomes", type=Path, required=True, help="JSON: test id -> outcome")
    group.addoption("--fixtures-of", action="append", default=[], help="a module that has some")
    group.addoption("--left-out", type=Path, required=True, help="JSON: names of test functions")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("cpu_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{marker}: of vLLM")
    if config.getoption("--relay-schedulers"):
        take_the_place_of_schedulers()
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    for module in config.getoption("--fixtures-of"):  # which import the schedulers
        config.pluginmanager.import_plugin(module)


def take_the_place_of_schedulers() -> None:
    """Before a test module has imported them, and with what engine cores have when they start."""
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched import async_scheduler, scheduler

    from vllm_relay.plugin import register

    register()
    SchedulerConfig.default_factory().get_scheduler_cls()
    from vllm_relay.scheduler.vllm_scheduler import AsyncRelayScheduler, SyncRelayScheduler

    scheduler.Scheduler = SyncRelayScheduler
    async_scheduler.AsyncScheduler = AsyncRelayScheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(json.loads(config.getoption("--left-out").read_text()))
    names = {item.nodeid: item.nodeid.partition("[")[0] for item in items}
    if gone := left_out - set(names.values()):
        raise pytest.UsageError(f"left out, but there is no such test: {', '.join(sorted(gone))}")
    config.hook.pytest_deselected(items=[x for x in items if names[x.nodeid] in left_out])
    items[:] = [item for item in items if names[item.nodeid] not in left_out]


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """As in the conftest.py of vLLM's tests, which is not read: it needs packages of theirs."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


class Outcomes:
    """What became of every test: "passed", "skipped" or "failed", also in its fixtures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.when == "call" or not report.passed:
            self._outcomes[item.nodeid] = report.outcome
        return report

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._outcomes, indent=1))
