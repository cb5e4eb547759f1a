# SPDX-License-Identifier: Apache-2.0
"""Which tokens the query tokens of a step see, where requests hide some of theirs.

Backends do not know why tokens are hidden. Who does says so once in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class StepRows:
    """Runs of query tokens that see the same, as if each were a request.

    Attributes:
        requests: int64 [rows]; the request of each, or None if all are as they were.
        query_start_loc, seq_lens: as the step has them, for these rows.
    """

    requests: np.ndarray | None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    hidden: HiddenTokens


class RowSource(Protocol):
    """Knows the requests of a worker that hide tokens."""

    @property
    def requests(self) -> Collection[str]:
        """Their ids."""

    def rows_of_step(self, query_start_loc: np.ndarray, seq_lens: np.ndarray) -> StepRows | None:
        """How the query tokens of the running step see their tokens; None: as always.

        Args:
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests], the tokens of the step included.
        """


_make_source: Callable[[VllmConfig], RowSource | None] | None = None


def use_rows_of(make_source: Callable[[VllmConfig], RowSource | None]) -> None:
    """Let the backends of this process ask what ``make_source(vllm_config)`` returns."""
    global _make_source
    _make_source = make_source


def row_source(vllm_config: VllmConfig) -> RowSource | None:
    """Whom the backends of a worker ask; None: nobody, tokens are never hidden.

    Raises:
        RuntimeError: nobody has said whom: the plug-in is not registered in this process.
    """
    if _make_source is None:
        raise RuntimeError(
            "vllm-relay: a backend is set up in a process in which the plug-in is not registered: "
            "call vllm_relay.plugin.register() first"
        )
    return _make_source(vllm_config)
