# SPDX-License-Identifier: Apache-2.0
"""How the options of long contexts become those of the context database."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.worker_contexts import db_options
from vllm_relay.sparse.query_types import Dipr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"index": "auto", "given_query": Dipr(alpha=0.01)}),
        ({"alpha": 0.5}, {"index": "auto", "given_query": Dipr(alpha=0.5)}),
        ({"max_error": 0.1}, {"index": "auto", "given_query": None, "max_error": 0.1}),
        ({"alpha": 0}, {"index": "flat", "given_query": None}),
        (
            {"max_dropped_mass": 0.1},
            {"index": "flat", "given_query": Dipr(alpha=0.01), "max_dropped_mass": 0.1},
        ),
        (
            {"max_dropped_mass": 0.1, "max_error": 0.2},
            {"index": "auto", "given_query": None, "max_dropped_mass": 0.1, "max_error": 0.2},
        ),
    ],
    ids=lambda each: "-".join(each),
)
def test_what_is_asked_of_stored_contexts(given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = db_options(RelayConfig(**given))
    assert {name: getattr(options, name) for name in expected} == expected
