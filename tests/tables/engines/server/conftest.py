# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.support.waiting import WAIT_S
from vllm_relay.tables.engines.server import admission


@pytest.fixture(autouse=True)
def first_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few come first until one is answered, however long that takes."""
    monkeypatch.setattr(admission, "_FIRST_S", WAIT_S)
