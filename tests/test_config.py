# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from vllm_relay.config import RelayConfig, misspelled_section


def config_with(additional_config: Any) -> Any:
    return SimpleNamespace(additional_config=additional_config)


class HashableSettings:
    """vLLM also allows an object that is no dict."""

    def compute_hash(self) -> str:
        return ""


@pytest.mark.parametrize(
    "additional_config",
    [{}, {"relay": {}}, {"relay": None}, {"gdn_prefill_backend": "auto"}, HashableSettings()],
)
def test_defaults(additional_config: Any) -> None:
    options = RelayConfig.from_vllm_config(config_with(additional_config))
    assert options == RelayConfig(sharing=True, min_shared_tokens=0, kernel="auto", log_every_s=0.0)


def test_all_options_are_read() -> None:
    given = {"sharing": False, "min_shared_tokens": 256, "kernel": "portable", "log_every_s": 2}
    options = RelayConfig.from_vllm_config(config_with({"relay": given}))
    assert options.model_dump().items() >= given.items()


def test_strings_of_the_command_line_are_converted() -> None:
    options = RelayConfig.from_options({"sharing": "false", "min_shared_tokens": "64"})
    assert (options.sharing, options.min_shared_tokens) == (False, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"depht": 3},
            "additional_config.relay.depht: unknown option; known options: sharing, "
            "min_shared_tokens, kernel, log_every_s",
        ),
        (
            {"kernel": "fast"},
            "additional_config.relay.kernel: given 'fast'; input should be 'auto'",
        ),
        ({"min_shared_tokens": -1}, "additional_config.relay.min_shared_tokens: given -1;"),
        ({"min_shared_tokens": 1.5}, "additional_config.relay.min_shared_tokens: given 1.5;"),
        ({"log_every_s": float("inf")}, "additional_config.relay.log_every_s: given inf;"),
        ({"sharing": "perhaps"}, "additional_config.relay.sharing: given 'perhaps';"),
        ([1], "additional_config.relay: given [1], expected a mapping of option to value;"),
        ("sharing", "additional_config.relay: given 'sharing', expected a mapping"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RelayConfig.from_vllm_config(config_with({"relay": options}))


def test_every_bad_option_is_reported() -> None:
    with pytest.raises(ValueError, match=r"relay\.kernel: .*; additional_config\.relay\.typo: "):
        RelayConfig.from_options({"kernel": "fast", "typo": 1})


@pytest.mark.parametrize("name", ["Relay", "RELAY", "re_lay", "vllm-relay", "vllm_relay"])
def test_misspelled_section_is_found(name: str) -> None:
    assert misspelled_section(config_with({name: {"sharing": False}})) == name
    assert misspelled_section(config_with({"relay": {}, "relay_team": {}})) is None


def test_options_do_not_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        RelayConfig().sharing = False
