# SPDX-License-Identifier: Apache-2.0
"""The options of the RELAY_SPARSE backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

PrefillMode = Literal["exact_offload", "exact_resident"]
ClientContexts = Literal["guarded", "open", "off"]


class LongContextOptions(BaseModel):
    """What `--attention-backend relay_sparse` reads of ``additional_config["relay"]``."""

    min_context_tokens: int = Field(
        default=4096,
        ge=1,
        description="A request of fewer tokens stays on the device and is computed densely.",
    )
    sink_tokens: int = Field(
        default=64,
        ge=0,
        description="First tokens of a context, which stay on the device and every query reads.",
    )
    window_tokens: int = Field(
        default=256,
        ge=1,
        description="Last tokens of a context, which stay on the device and every query reads.",
    )
    prefill: PrefillMode | None = Field(
        default=None,
        description="exact_offload frees a prompt's KV blocks while it is computed, and reads what "
        "has left from host memory; exact_resident frees them when all of it is computed. None: "
        "exact_offload on CPUs, exact_resident on GPUs, which know no other.",
    )
    alpha: float = Field(
        default=2e-4,
        ge=0,
        le=1,
        description="Tokens in host memory are read if their attention weight is at least this "
        "share of the largest one. 0 reads all of them.",
    )
    estimate_unread: bool = Field(
        default=True,
        description="What is not read counts too: each 64 adjacent tokens by the mean of their "
        "values, with the weight that the eight-bit codes of their keys tell. Contexts get flat "
        "indexes then. Not with max_error or max_dropped_mass.",
    )
    max_error: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="For stored contexts, instead of alpha: each kv head reads what keeps its "
        "attention output within this relative error for 99% of the queries it has seen. None: "
        "as alpha says.",
    )
    max_dropped_mass: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="The most attention weight of the tokens in host memory that may be left out: "
        "more are read until a computed bound says so. None: as alpha says.",
    )
    host_memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Host memory for keys, values and indexes. None: half of what is available "
        "when the engine starts.",
    )
    index_threads: int = Field(
        default=1,
        ge=1,
        description="Threads that build graphs and plans beside the steps of the engine.",
    )
    context_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of stored contexts, found again by the next engine. None keeps them in "
        "memory.",
    )
    context_disk_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Most that contexts may take in context_dir: those used least recently leave. "
        "None: no limit.",
    )
    contexts: tuple[str, ...] = Field(
        default=(),
        description="Contexts that are computed and stored before the first request is served: "
        "text, or @ and the path of a file with the text.",
    )
    client_contexts: ClientContexts = Field(
        default="guarded",
        description="Whether requests that ask for it are kept as contexts: guarded keeps them "
        "where there is no server, or where it has an API key; open also on a server without one; "
        "off nowhere.",
    )
    max_client_context_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that all contexts together may have which requests asked for: "
        "those used least recently leave for new ones. None: as many as half of host_memory_gib "
        "holds on a server, and no limit where there is none.",
    )
