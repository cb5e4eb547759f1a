# SPDX-License-Identifier: Apache-2.0
"""Prompts with modules for `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.config import RelayConfig
from vllm_relay.modules.engine.requests import unsupported_reason, with_plan
from vllm_relay.modules.markup.schema import Schema
from vllm_relay.modules.prompt.render import Mode, RenderedPrompt
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.prefix_cache.pins.client import Declaration, Pin, pin_tokens

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


@dataclass(frozen=True)
class ModularOutput:
    """
    Attributes:
        prompt: what was computed, and of which modules.
        output: vLLM's.
    """

    prompt: RenderedPrompt
    output: RequestOutput

    @property
    def text(self) -> str:
        return self.output.outputs[0].text


class ModularLLM:
    """An `LLM` and the schemas of its prompts.

    Args:
        schemas: or the paths of their files.

    Raises:
        ValueError: this engine cannot use modules; with the reason.
    """

    def __init__(self, llm: LLM, *schemas: Schema | Path | str) -> None:
        config = llm.llm_engine.vllm_config
        if reason := unsupported_reason(config):
            raise ValueError(f"prompt modules: {reason}")
        self.llm = llm
        self.schemas = SchemaStore(
            llm.get_tokenizer(),
            block_size=config.cache_config.block_size,
            max_model_len=config.model_config.max_model_len,
        )
        configured = map(Path, RelayConfig.from_vllm_config(config).schemas)
        for schema in (*configured, *schemas):
            self.schemas.add(Path(schema) if isinstance(schema, str) else schema)

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: Mode = "modular",
        repair_tokens: int | None = None,
        **keywords: Any,
    ) -> list[ModularOutput]:
        """Answers to prompts in PML.

        Args:
            sampling_params: for all prompts, or of each.
            keywords: for `LLM.generate`.

        Raises:
            PmlError: a prompt does not fit its schema; nothing was computed.
            ValueError: there is no such mode, or it has no `repair_tokens`.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        rendered = [
            self.schemas.render(prompt, mode=mode, repair_tokens=repair_tokens)
            for prompt in prompts
        ]
        given = sampling_params or self.llm.get_default_sampling_params()
        params = list(given) if isinstance(given, Sequence) else [given] * len(rendered)
        if len(params) != len(rendered):
            raise ValueError(f"{len(params)} sampling_params for {len(rendered)} prompts")
        outputs = self.llm.generate(
            [{"prompt_token_ids": each.token_ids} for each in rendered],
            [
                with_plan(each, prompt, self.schemas.max_model_len)
                for each, prompt in zip(params, rendered, strict=True)
            ],
            **keywords,
        )
        pairs = zip(rendered, outputs, strict=True)
        return [ModularOutput(prompt, output) for prompt, output in pairs]

    def pin(self, prompt: str, pin_id: str | None = None, *, ttl_s: float | None = None) -> Pin:
        """Compute the modules of a prompt and keep them until `unpin`.

        Args:
            prompt: PML, as for `generate`; the modules are enough.
            pin_id, ttl_s: as for `vllm_relay.prefix_cache.pin`.

        Raises:
            PmlError: the prompt does not fit its schema.
            CommandError: its modules cannot be pinned.
        """
        if not isinstance(prompt, str):
            raise CommandError(400, f"prompt: given {prompt!r}, expected a text in PML")
        rendered = self.schemas.render(prompt, to_pin=True)
        asked = Declaration(rendered.token_ids, pin_id, rendered.plan, ttl_s=ttl_s)
        return pin_tokens(self.llm.llm_engine, asked)
