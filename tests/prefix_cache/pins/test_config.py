# SPDX-License-Identifier: Apache-2.0
"""Which configurations are scheduled by RelayScheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay.config import scheduler_is_selected
from vllm_relay.scheduler import RelayScheduler


def config(scheduler_cls: Any = None, **options: Any) -> Any:
    return SimpleNamespace(
        additional_config={"relay": options} if options else {},
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls),
    )


@pytest.mark.parametrize(
    ("vllm_config", "selected"),
    [
        (config(), False),
        (config(sharing=False), False),
        (config(scheduler=True), True),
        (config("vllm_relay.scheduler.RelayScheduler"), True),
        (config("vllm_relay.scheduler.RelayScheduler", scheduler=False), True),
        (config(RelayScheduler), True),
        (config("vllm_relay.schedulers.Other"), False),
        (config("vllm.v1.core.sched.scheduler.Scheduler"), False),
        (config(SimpleNamespace), False),
    ],
)
def test_relay_scheduler_is_selected(vllm_config: Any, selected: bool) -> None:
    assert scheduler_is_selected(vllm_config) is selected


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="additional_config.relay.schedular: unknown option"):
        scheduler_is_selected(config(schedular=True))
