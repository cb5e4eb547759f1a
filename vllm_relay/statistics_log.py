# SPDX-License-Identifier: Apache-2.0
"""Log lines with what an engine core counts: every so many seconds, and at the end what is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from vllm_relay.config import RelayConfig

_ATTRIBUTE = "relay_statistics_log"

logger = logging.getLogger("vllm.relay")


class Statistics(Protocol):
    """Counters; a new one has counted nothing."""

    def merge(self, later: Any) -> None:
        """Add later statistics."""


S = TypeVar("S", bound=Statistics)


class StatisticsLog:
    """
    Args:
        every_s: seconds between two lines of one kind of statistics; 0 logs none.
    """

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last_s = clock()
        self._sums: dict[type[Any], tuple[Any, Callable[[Any], str]]] = {}

    def add(self, step: S, text_of: Callable[[S], str] = str) -> None:
        """Count a step, and log all that was counted if that is due."""
        if self._every_s <= 0:
            return
        total, _ = self._sums.setdefault(type(step), (type(step)(), text_of))
        total.merge(step)
        if self._clock() - self._last_s >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Log what was counted since the last lines."""
        for total, text_of in self._sums.values():
            logger.info("vllm-relay: %s", text_of(total))
        self._sums.clear()
        self._last_s = self._clock()


def log_of(scheduler: Any) -> StatisticsLog:
    """The log of the engine core that a scheduler is in."""
    log = getattr(scheduler, _ATTRIBUTE, None)
    if log is None:
        log = StatisticsLog(RelayConfig.from_vllm_config(scheduler.vllm_config).log_every_s)
        setattr(scheduler, _ATTRIBUTE, log)
    return log


def end_log_of(scheduler: Any) -> None:
    """Log what is left; nothing where nothing was ever counted."""
    if (log := getattr(scheduler, _ATTRIBUTE, None)) is not None:
        log.flush()
