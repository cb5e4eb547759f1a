# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.one_ray import one_ray


@pytest.fixture(scope="module", autouse=True)
def alone_with_ray() -> Iterator[None]:
    with one_ray():
        yield
