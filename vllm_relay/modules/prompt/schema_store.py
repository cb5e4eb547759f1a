# SPDX-License-Identifier: Apache-2.0
"""The schemas that a front end knows, in the tokens of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from vllm_relay.commands.owners import PYTHON, check_owner
from vllm_relay.modules.markup.pml import did_you_mean, listed, parse_prompt, read_schema
from vllm_relay.modules.markup.schema import Schema, TooManySchemasError
from vllm_relay.modules.markup.xml_tree import Document, Place, PmlError
from vllm_relay.modules.prompt.layout import SchemaTokens, tokenize_schema
from vllm_relay.modules.prompt.render import Mode, RenderedPrompt, Rendering, num_repaired_tokens
from vllm_relay.modules.prompt.text_tokens import TextTokens


class SchemaStore:
    """
    Args:
        tokenizer: a Hugging Face tokenizer.
        block_size: tokens of a KV block of the engine.
        max_model_len: positions and slots a prompt may take, and positions of a schema; None: any
            number.
        max_schemas, max_tokens: of all schemas together; None: any number.
        chat_template: instead of the tokenizer's own.
        chat_template_kwargs: what else it is given.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        block_size: int,
        max_model_len: int | None = None,
        max_schemas: int | None = None,
        max_tokens: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.text_tokens = TextTokens(tokenizer, chat_template, chat_template_kwargs)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self._max_schemas, self._max_tokens = max_schemas, max_tokens
        self._schemas: dict[str, SchemaTokens] = {}
        self._owners: dict[str, str] = {}
        self._lock = Lock()  # servers add schemas in threads
        # a tokenizer of vLLM tells how long its tokens are
        chars_per_token = getattr(tokenizer, "max_chars_per_token", None)
        self._max_chars = (
            max_model_len * chars_per_token if max_model_len and chars_per_token else None
        )

    def add(self, schema: Schema | Path, owner: str = PYTHON) -> SchemaTokens:
        """Add a schema, or take the place of the one with its name and owner.

        Raises:
            SchemaError, PmlError: it cannot be understood, or rendered for this model, or there is
                no room for it.
            CommandError: 403 there is one of its name that is another owner's.
        """
        if isinstance(schema, Path):
            schema = read_schema(schema)
        self._check_owner(schema.name, owner)  # before the long work
        tokens = tokenize_schema(
            schema, self.text_tokens, max_positions=self.max_model_len, max_tokens=self._max_tokens
        )
        with self._lock:
            self._check_owner(schema.name, owner)
            self._check_room(schema.name, tokens.num_tokens)
            self._schemas[schema.name] = tokens
            self._owners[schema.name] = owner
        return tokens

    def _check_owner(self, name: str, asking: str) -> None:
        owner = self._owners.get(name, asking)
        check_owner(f"schema {name!r}", owner, asking, option="schemas")

    def _check_room(self, name: str, num_tokens: int) -> None:
        others = [each for each in self._schemas.values() if each.schema.name != name]
        if self._max_schemas is not None and len(others) >= self._max_schemas:
            raise TooManySchemasError(
                f"schema {name!r}: there are {len(others)} schemas, expected at most "
                f"{self._max_schemas} (max_schemas): delete one first"
            )
        of_others = sum(each.num_tokens for each in others)
        if self._max_tokens is not None and of_others + num_tokens > self._max_tokens:
            raise TooManySchemasError(
                f"schema {name!r}: takes {num_tokens} tokens, the others {of_others} of "
                f"{self._max_tokens} (max_schema_tokens): delete one first"
            )

    def remove(self, name: str, owner: str = PYTHON) -> None:
        """
        Raises:
            KeyError: there is none of this name.
            CommandError: 403 it is another owner's.
        """
        with self._lock:
            self._check_owner(name, owner)
            del self._schemas[name], self._owners[name]

    def __getitem__(self, name: str) -> SchemaTokens:
        return self._schemas[name]

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def names(self) -> list[str]:
        return list(self._schemas)

    def unknown(self, name: str) -> str:
        """What to say of a name that no schema has."""
        names = self.names()
        known = listed(names) or "none"
        return f"unknown schema {name!r}; known: {known}{did_you_mean(name, names)}"

    def render(
        self,
        prompt: str,
        *,
        schema: str | None = None,
        source: str = "prompt",
        mode: Mode = "modular",
        repair_tokens: int | None = None,
        to_pin: bool = False,
    ) -> RenderedPrompt:
        """What the engine computes for a prompt in PML.

        Args:
            schema: the name of its schema, if the prompt is only what stands in <prompt>.
            source: what errors call the prompt.
            mode: "modular" uses stored tokens as they are, "repair" computes the first
                `repair_tokens` of each module in the context of the prompt, "exact" stores nothing
                apart.
            to_pin: see `Rendering`.

        Raises:
            PmlError: it cannot be understood, does not fit its schema, or is too long.
            ValueError: see `num_repaired_tokens`.
        """
        num_repaired = num_repaired_tokens(mode, repair_tokens)
        if self._max_chars is not None and len(prompt) > self._max_chars:
            raise PmlError(
                Place(Document("", source), 0),
                f"the prompt has {len(prompt)} characters, expected at most {self._max_chars}: the "
                f"model takes {self.max_model_len} tokens",
            )
        markup = parse_prompt(prompt, source, schema=schema)
        if markup.schema not in self._schemas:
            raise PmlError(markup.root.place, self.unknown(markup.schema))
        rendering = Rendering(
            self._schemas[markup.schema],
            markup,
            self.text_tokens,
            repair_tokens=num_repaired,
            to_pin=to_pin and mode != "exact",
        )
        is_exact = mode == "exact"
        rendered = rendering.written_out() if is_exact else rendering.planned(self.block_size)
        limit = self.max_model_len
        if limit is not None and rendered.min_model_len >= limit:
            raise PmlError(
                markup.root.place,
                f"the prompt takes {len(rendered.token_ids)} tokens with padding to KV blocks of "
                f"{self.block_size} (--block-size) and positions up to {rendered.last_position}, "
                f"the model takes less than {limit}",
            )
        return rendered
