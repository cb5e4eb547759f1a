# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: the environment, hypothesis's profile, and the order."""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import vllm_processes
from tests.support.depth import cases
from tests.support.vllm_users import touches_vllm
from vllm_relay.wiring import hide_tokens_of_modules

gc.disable()  # until the first test: what is imported is no garbage to look through

# read by vLLM when it is imported
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no thread when numpy is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests run beside each other
os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported
importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it

hide_tokens_of_modules()  # as the plug-in does in every process

hypothesis.settings.register_profile("relay", deadline=None, max_examples=cases(25))
hypothesis.settings.load_profile("relay")

_FIRST = "integration", "vllm", "long"
"""Marks."""


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Also of the package's logger, whose parent propagates nothing once vLLM has set it up."""
    logger = logging.getLogger("vllm.relay")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagates


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real instruct model, made once for all processes and kept for the next run."""
    from vllm_relay.demo.smollm2.download import smollm2_folder

    return smollm2_folder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what touches vLLM. The longest files come first: they would end last, and processes
    wait for them."""
    for item in items:
        if item.get_closest_marker("integration") is not None or touches_vllm(item.path):
            item.add_marker("vllm")
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in _FIRST])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """What is there before the first test is kept, garbage too: to look for it takes longer than
    to keep it. It is what engines begin with."""
    if any(item.get_closest_marker("integration") is not None for item in session.items):
        vllm_processes.fork_server()
    gc.freeze()
    gc.enable()
    # vLLM thaws the heap when an engine ends in this process, and looks through all of it
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


def pytest_report_header() -> str:
    found = importlib.metadata.distribution("vllm")
    return f"vllm: {found.version}, from {found.locate_file('vllm')}"
