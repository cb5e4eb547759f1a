# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, Literal

import pydantic
import pytest

from vllm_relay.config import RelayConfig, misspelled_section, scheduler_is_selected


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
    options = RelayConfig.from_options(
        {"sharing": "false", "warm_up": "true", "min_shared_tokens": "64", "max_hold_s": "1.5"}
    )
    assert (options.sharing, options.warm_up) == (False, True)
    assert (options.min_shared_tokens, options.max_hold_s) == (64, 1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"depht": 3},
            "additional_config.relay.depht: unknown option; known options: sharing, "
            "min_shared_tokens, kernel, cuda_kernels, log_every_s",
        ),
        (
            {"shareing": False},
            "additional_config.relay.shareing: unknown option; did you mean sharing? "
            "known options: sharing, min_shared_tokens",
        ),
        (
            {"kernel": "fast"},
            "additional_config.relay.kernel: given 'fast', expected 'auto', 'amx_bf16', "
            "'avx512_bf16', 'avx512', 'avx2', 'neon_bf16', 'neon', 'portable' or "
            "'avx512_bf16_rounded', or leave it out for \"auto\"",
        ),
        (
            {"eviction": "LRU"},
            "additional_config.relay.eviction: given 'LRU', expected 'queue' or 'lru', or "
            'leave it out for "queue"',
        ),
        (
            {"min_shared_tokens": 1.5},
            "additional_config.relay.min_shared_tokens: given 1.5, expected an integer, or leave "
            "it out for 0",
        ),
        (
            {"max_overtakes": "many"},
            "additional_config.relay.max_overtakes: given 'many', expected an integer, or leave it "
            "out for 256",
        ),
        (
            {"max_overtakes": True},
            "additional_config.relay.max_overtakes: given True, expected an integer, or leave it "
            "out for 256",
        ),
        (
            {"log_every_s": False},
            "additional_config.relay.log_every_s: given False, expected a number, or leave it out "
            "for 0.0",
        ),
        (
            {"max_overtakes": "true"},
            "additional_config.relay.max_overtakes: given 'true', expected an integer, or leave it",
        ),
        (
            {"max_hold_s": -1},
            "additional_config.relay.max_hold_s: given -1, expected a number from 0, or leave it "
            "out for 2.0",
        ),
        (
            {"log_every_s": float("inf")},
            "additional_config.relay.log_every_s: given inf, expected a finite number, or",
        ),
        (
            {"log_every_s": [10]},
            "additional_config.relay.log_every_s: given [10], expected a number, or leave it out",
        ),
        (
            {"scheduler": "perhaps"},
            "additional_config.relay.scheduler: given 'perhaps', expected true or false, or leave "
            "it out for false",
        ),
        (
            {"warm_up": 3},
            "additional_config.relay.warm_up: given 3, expected true or false, or leave it out for "
            "true",
        ),
        (
            {"routes": "closed"},
            "additional_config.relay.routes: given 'closed', expected 'guarded', 'open' or 'off', "
            'or leave it out for "guarded"',
        ),
        (
            {"client_contexts": "on"},
            "additional_config.relay.client_contexts: given 'on', expected 'guarded', 'open' or "
            "'off', or leave it out for \"guarded\"",
        ),
        ({"max_client_context_tokens": True}, "given True, expected an integer, or leave it out"),
        ({"max_client_context_tokens": 0}, "given 0, expected a number from 1, or leave it out"),
        (
            {"max_pinned_fraction": 50},
            "additional_config.relay.max_pinned_fraction: given 50, expected a number up to 1, or "
            "leave it out for 0.5",
        ),
        ({"max_pinned_fraction": True}, "given True, expected a number, or leave it out for 0.5"),
        (
            {"system_prompts": "Be brief."},
            "additional_config.relay.system_prompts: given 'Be brief.', expected a list of texts: "
            "write ['Be brief.'], or as a flag --additional-config.relay.system_prompts+ TEXT",
        ),
        (
            {"system_prompts": {"en": "Be brief."}},
            "additional_config.relay.system_prompts: given {'en': 'Be brief.'}, expected a list of "
            'texts: write ["TEXT", "@PATH"], or as a flag',
        ),
        (
            {"system_prompts": ["Be brief.", 7]},
            "additional_config.relay.system_prompts[1]: given 7, expected a text: write",
        ),
        ([1], "additional_config.relay: given [1], expected a mapping of option to value;"),
        ("sharing", "additional_config.relay: given 'sharing', expected a mapping"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RelayConfig.from_vllm_config(config_with({"relay": options}))


def test_what_pydantic_expects_is_taken_as_it_is() -> None:
    class OtherConfig(RelayConfig):
        kernel: Literal["{name}"] = "{name}"

    with pytest.raises(ValueError, match=r"kernel: given 'fast', expected '{name}', or"):
        OtherConfig.from_options({"kernel": "fast"})


def test_long_values_are_shortened() -> None:
    with pytest.raises(
        ValueError, match=r"given 'Be brief\. .{30,50}\.\.\..{9}', expected"
    ) as error:
        RelayConfig.from_options({"system_prompts": "Be brief. " * 1000})
    assert len(str(error.value)) < 300


def test_every_bad_option_is_reported() -> None:
    with pytest.raises(ValueError, match=r"relay\.kernel: .*; additional_config\.relay\.typo: "):
        RelayConfig.from_options({"kernel": "fast", "typo": 1})


@pytest.mark.parametrize(
    "name", ["Relay", "RELAY", "re_lay", "vllm-relay", "vllm_relay", "relay.scheduler"]
)
def test_misspelled_section_is_found(name: str) -> None:
    assert misspelled_section(config_with({name: {"sharing": False}})) == name
    assert misspelled_section(config_with({"relay": {}, "relay_team": {}})) is None


@pytest.mark.parametrize("name", ["reley", "realy", "rely", "vllm_rely", "Relai", "reley.sharing"])
def test_a_section_with_options_of_relay_is_found_by_its_name(name: str) -> None:
    value = False if "." in name else {"sharing": False}
    assert misspelled_section(config_with({name: value})) == name
    assert misspelled_section(config_with({"other": value})) is None


@pytest.mark.parametrize("value", [{"speed": 2}, {}, None, "sharing", ["sharing"]])
def test_a_section_of_another_plugin_may_have_a_name_like_relay(value: object) -> None:
    assert misspelled_section(config_with({"replay": value, "delay.speed": 2})) is None


def test_a_misspelled_scheduler_class_is_refused() -> None:
    config: Any = config_with({})
    config.scheduler_config = SimpleNamespace(scheduler_cls="vllm_relay.scheduler.RelaySchedular")
    with pytest.raises(ValueError, match=r"expected vllm_relay\.scheduler\.RelayScheduler"):
        scheduler_is_selected(config)


def test_the_log_has_the_options_that_were_given() -> None:
    given = {"eviction": "lru", "min_shared_tokens": 256, "sharing": True, "max_error": None}
    shown = RelayConfig.from_options(given).given()
    names = ("sharing true", "min_shared_tokens 256", "eviction lru", "max_error null")
    assert sorted(shown.split(", ")) == sorted(names)
    assert RelayConfig.from_options({}).given() == "defaults"


def test_texts_do_not_go_to_the_log() -> None:
    config = RelayConfig.from_options(
        {"system_prompts": ["secret", "more"], "contexts": ["hidden"]}
    )
    assert sorted(config.given().split(", ")) == ["contexts of 1", "system_prompts of 2"]


def test_options_do_not_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        RelayConfig().sharing = False
