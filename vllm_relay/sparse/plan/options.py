# SPDX-License-Identifier: Apache-2.0
"""The options of a context database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_relay.sparse.index.query_types import Dipr, QueryType

IndexKind = Literal["auto", "rules", "flat", "blocks", "coarse", "graph"]


class DBOptions(BaseModel):
    """How the contexts of a `DB` are indexed and what a token being decoded reads of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    sink_tokens: int = Field(
        default=32,
        ge=0,
        strict=True,
        description="First tokens of a reused context, which every query reads.",
    )
    recent_tokens: int = Field(
        default=64,
        ge=0,
        strict=True,
        description="Last tokens of a reused context, which every query reads; tokens computed in "
        "the session are always read.",
    )
    min_context_tokens: int = Field(
        default=2048,
        ge=0,
        strict=True,
        description="A reused context shorter than this is read as a whole.",
    )
    query: QueryType = Field(
        default=Dipr(alpha=0.01),
        description="Which keys a decoded token retrieves from a reused context: Dipr(alpha=...), "
        "Dipr(beta=...) or TopK(k). Unless it is given, the plan of each kv head says so, and this "
        "is asked where there is no plan.",
    )
    index: IndexKind = Field(
        default="auto",
        description="Which index a context gets for each layer and kv head. auto: a plan for each "
        "head, by what its queries need and what searches cost on this machine; rules: flat for "
        "the first layer, graph for others.",
    )
    max_error: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="What a plan lets the attention output of a kv head be off by, as relative L2 "
        "error, for 99% of the queries it was made with. With `query` given, plans keep to that "
        "and choose index and width only.",
    )
    max_dropped_mass: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="How much of the attention weight of the searched tokens may be left out: more "
        "are retrieved until a computed bound says so. None: as the query says.",
    )
    train_queries_per_key: float = Field(
        default=0.4,
        ge=0,
        le=1,
        description="How many queries an index learns from, relative to its keys. 0 keeps none.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Threads that build indexes. None: every core of this process.",
    )
    seed: int = Field(default=0, ge=0, strict=True, description="Seed of the indexes.")
    memory_limit_bytes: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Host memory for contexts. In memory: those that were deleted and are still "
        "used count too, and storing beyond it is refused. On disk: pages that are kept; None "
        "leaves that to the operating system.",
    )
    index_factory: Callable[[int], Any] | None = Field(
        default=None,
        exclude=True,
        description="Makes the unbuilt `KeyIndex` of a layer, instead of `index`.",
    )

    @property
    def given_query(self) -> QueryType | None:
        """`query`, unless it is the default one: then plans choose it."""
        return self.query if "query" in self.model_fields_set else None

    @field_validator("max_dropped_mass", "max_error", "train_queries_per_key", mode="before")
    @classmethod
    def _check_is_no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"given {value}, expected a number")
        return value
