# SPDX-License-Identifier: Apache-2.0
"""The options of vllm-relay, read from vLLM's ``additional_config["relay"]``.

long_contexts.py     those of RELAY_SPARSE; all others are here
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from vllm_relay.arguments import shortened
from vllm_relay.config.long_contexts import LongContextOptions
from vllm_relay.limits import KernelChoice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER_PATH = "vllm_relay.scheduler.RelayScheduler"
SECTION = "additional_config.relay"
TENANT_ARG = "tenant"
"""The key in ``SamplingParams.extra_args`` under which a request says whose it is."""


EvictionPolicyName = Literal["queue", "lru"]
Routes = Literal["guarded", "open", "off"]


# pydantic's types of error for what is no number
_NUMBER_ERRORS: dict[Any, Literal["int_type", "float_type"]] = {
    int: "int_type",
    int | None: "int_type",
    float: "float_type",
    float | None: "float_type",
}

SCHEDULER_OPTIONS = frozenset(
    {
        "max_hold_s",
        "max_overtakes",
        "offline",
        "fair_share_by",
        "fair_share_tokens",
        "warm_up",
        "eviction",
        "max_pinned_fraction",
    }
)
PREFIX_CACHE_OPTIONS = frozenset({"warm_up", "eviction", "max_pinned_fraction"})
"""Those that say what becomes of the prefix cache."""
ATTENTION_OPTIONS = frozenset({"sharing", "min_shared_tokens", "kernel", "cuda_kernels"})


class SharingOptions(BaseModel):
    """What the RELAY and RELAY_SPARSE backends read."""

    sharing: bool = Field(
        default=True,
        description="Read the KV blocks that several requests share once for all of them. "
        "False computes every request on its own.",
    )
    min_shared_tokens: int = Field(
        default=0,
        ge=0,
        description="Shortest shared prefix, in tokens, that may be read once for its requests. "
        "0 leaves the choice to the cost model.",
    )
    kernel: KernelChoice = Field(
        default="auto",
        description="CPU kernel. auto takes the first of amx_bf16, avx512_bf16, avx512, avx2, "
        "neon_bf16, neon, portable that this CPU and the model's dtype allow, on Intel's CPUs from "
        "Sapphire Rapids on with avx512 before avx512_bf16. avx512_bf16_rounded trades accuracy "
        "for speed: see docs/kernels.md.",
    )
    cuda_kernels: Literal["auto", "flash", "flashinfer", "triton"] = Field(
        default="auto",
        description="What computes attention on NVIDIA GPUs. flash calls vLLM's FlashAttention "
        "over shared prefixes and over the rest of each request; flashinfer does so with vLLM's "
        "FlashInfer, on GPUs of compute capability 10.x; triton are kernels whose results do not "
        "depend on who shares, and which prompt modules and VLLM_BATCH_INVARIANT need. auto takes "
        "flashinfer on these GPUs, else flash, and triton for what they do not serve.",
    )
    log_every_s: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds between two log lines with the sharing statistics. 0 logs none.",
    )


class SchedulerOptions(BaseModel):
    """What selects RelayScheduler, and what it reads."""

    scheduler: bool = Field(
        default=False,
        description="Schedule with RelayScheduler, as --scheduler-cls "
        "vllm_relay.scheduler.RelayScheduler does.",
    )
    max_hold_s: float = Field(
        default=2.0,
        ge=0.0,
        allow_inf_nan=False,
        description="How long, in seconds, requests may be held for one that computes their "
        "prefix, and after its turn in the order of arrival a request is late. 0 keeps the order "
        "of arrival. Offline it is 600 unless it is given.",
    )
    max_overtakes: int = Field(
        default=256,
        ge=0,
        description="How many later requests may overtake a waiting one, beside as many as waited "
        "with it. 0 keeps the order of arrival.",
    )
    offline: bool = Field(
        default=False,
        description="Nobody waits for a first answer, as with LLM: requests may be held as long "
        "as their prefix takes.",
    )
    fair_share_by: Literal["none", "cache_salt", "lora", "label"] = Field(
        default="none",
        description="Give tenants equal shares of the tokens computed, and tell them apart by the "
        "cache salt of their requests, by the LoRA adapter, or by the label in vllm_xargs.tenant.",
    )
    fair_share_tokens: int = Field(
        default=16384,
        ge=1,
        description="How many tokens one tenant may use before the others have their turn.",
    )
    warm_up: bool = Field(
        default=True,
        description="Let one of several requests that share a prefix compute it, and hold the "
        "others until the prefix is resident.",
    )
    eviction: EvictionPolicyName = Field(
        default="queue",
        description="Which KV block leaves first: queue keeps what waiting requests need, the "
        "sooner the longer, and then what several have used; lru is vLLM's own order.",
    )
    system_prompts: tuple[str, ...] = Field(
        default=(),
        description="Prompts that are computed before the first request is served and never "
        "evicted: text, or @ and the path of a file with the text.",
    )
    max_pinned_fraction: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the KV cache that pinned prompts may take, system_prompts included. "
        "The longest request has to fit beside them in any case.",
    )


class ServerOptions(BaseModel):
    """What servers read."""

    routes: Routes = Field(
        default="guarded",
        description="The routes under /relay: guarded lets those that change anything be used with "
        "an API key only; open also on a server that has none; off serves none of them.",
    )
    page: bool = Field(
        default=False,
        description="Serve the live page /relay/, and let engines record which prefixes are in "
        "their KV caches.",
    )


class ModuleOptions(BaseModel):
    """What requests with prompt modules need."""

    schemas: tuple[str, ...] = Field(
        default=(),
        description="PML files with the schemas of prompt modules that a server knows from the "
        "start.",
    )
    max_schemas: int = Field(
        default=256, ge=1, description="How many schemas of prompt modules a server knows."
    )
    max_schema_tokens: int = Field(
        default=1_000_000,
        ge=1,
        description="How many tokens all schemas of a server may have together. A module counts as "
        "64 besides its text.",
    )
    max_markup_bytes: int = Field(
        default=1 << 20,
        ge=1,
        description="Longest body, in bytes, of a schema and of a request with the field relay.",
    )


class RelayConfig(
    ServerOptions, ModuleOptions, LongContextOptions, SchedulerOptions, SharingOptions
):
    """Options of the attention backends, of the scheduler and of the prefix cache.

    Given as ``--additional-config.relay.min_shared_tokens 256`` or
    ``LLM(additional_config={"relay": {"min_shared_tokens": 256}})``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts booleans as numbers."""
        error_type = _NUMBER_ERRORS.get(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and error_type is not None:
            raise PydanticKnownError(error_type)
        return value

    def given(self) -> str:
        """The options that were given, for a log; of lists their length, as texts may be secret."""
        shown = []
        for name in type(self).model_fields:
            if name in self.model_fields_set:
                value = getattr(self, name)
                is_text = isinstance(value, str)
                text = f"of {len(value)}" if isinstance(value, tuple) else json.dumps(value)
                shown.append(f"{name} {value if is_text else text}")
        return ", ".join(shown) or "defaults"

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> RelayConfig:
        """Read and check the options of a vLLM configuration.

        Raises:
            ValueError: an option is unknown or has a bad value; the message names the option.
        """
        return cls.from_options(options_of(vllm_config))

    @classmethod
    def from_options(cls, options: Any) -> RelayConfig:
        """Check ``options``, a mapping of option name to value or None for all defaults."""
        if options is None:
            return cls()
        if not isinstance(options, dict):
            raise ValueError(
                f"{SECTION}: given {options!r}, expected a mapping of option to value; "
                f"{_known_options()}"
            )
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise ValueError("; ".join(map(_describe, error.errors()))) from None


def options_of(vllm_config: VllmConfig) -> Any:
    """The raw value of ``additional_config["relay"]``, or None where there is none."""
    additional_config = vllm_config.additional_config
    if not isinstance(additional_config, dict):
        return None
    return additional_config.get("relay")


def misspelled_section(vllm_config: VllmConfig) -> str | None:
    """A key of ``additional_config`` that was probably meant to be "relay": its letters are those,
    or nearly, and then all that is under it are options of relay."""
    additional_config = vllm_config.additional_config
    given = additional_config if isinstance(additional_config, dict) else {}
    for name, value in given.items():
        section, _, option = name.partition(".")
        letters = re.sub(r"[\W_]", "", section).lower().removeprefix("vllm")
        options = {option} if option else set(value if isinstance(value, dict) else ())
        is_nearly = bool(get_close_matches(letters, ["relay"]))
        if name != "relay" and (
            letters == "relay"
            or (is_nearly and options and options <= RelayConfig.model_fields.keys())
        ):
            return name
    return None


def options_outside_section(vllm_config: VllmConfig) -> list[str]:
    """The keys of ``additional_config`` with names of relay's options: nobody reads them there,
    unless another plug-in has an option of that name."""
    given = vllm_config.additional_config
    return sorted(RelayConfig.model_fields.keys() & (given if isinstance(given, dict) else {}))


def scheduler_is_selected(vllm_config: VllmConfig) -> bool:
    """Whether RelayScheduler schedules the requests of this configuration.

    Raises:
        ValueError: the options under ``additional_config["relay"]`` are bad.
    """
    path = vllm_config.scheduler_config.scheduler_cls
    if not isinstance(path, str):
        path = f"{getattr(path, '__module__', '')}.{getattr(path, '__name__', '')}"
    if path.startswith("vllm_relay.scheduler.vllm_scheduler.") or path == SCHEDULER_PATH:
        return True
    if path.startswith("vllm_relay.scheduler."):
        raise ValueError(f"--scheduler-cls: given {path}, expected {SCHEDULER_PATH}")
    return RelayConfig.from_vllm_config(vllm_config).scheduler


def _known_options() -> str:
    return f"known options: {', '.join(RelayConfig.model_fields)}"


# by pydantic's type of error, where its own words are those of Python or of a parser
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "greater_than_equal": "a number from {ge:g}",
    "less_than_equal": "a number up to {le:g}",
    "string_type": "a text",
    "tuple_type": "a list of texts",
}


def _describe(error: Any) -> str:
    """What was given, what was expected, and what to do."""
    name, *indices = error["loc"]
    option = f"{SECTION}.{name}" + "".join(f"[{index}]" for index in indices)
    if error["type"] == "extra_forbidden":
        close = get_close_matches(str(name), RelayConfig.model_fields, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        return f"{option}: unknown option; {meant}{_known_options()}"
    given = shortened(error["input"])
    if error["type"] in _EXPECTED:
        expected = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
    else:
        expected = error["msg"].removeprefix("Input should be ")
    message = f"{option}: given {given}, expected {expected}"
    default = RelayConfig.model_fields[name].default
    if isinstance(default, tuple):
        texts = f"[{given}]" if isinstance(error["input"], str) else '["TEXT", "@PATH"]'
        return f"{message}: write {texts}, or as a flag --additional-config.relay.{name}+ TEXT"
    return f"{message}, or leave it out for {json.dumps(default)}"
