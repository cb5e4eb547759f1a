# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with stored contexts, said before an engine starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_relay.commands.at_start import check_texts
from vllm_relay.config import SECTION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig


def check_context_dir(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Makes the folder if it is missing, for its owner only. Raises ValueError: ``context_dir`` or
    ``context_disk_gib`` is of no use, with the way out."""
    if options.context_dir is None:
        if options.context_disk_gib is not None:
            raise ValueError(
                f"{SECTION}.context_disk_gib bounds {SECTION}.context_dir, which is not given: "
                "give both, or host_memory_gib to bound contexts in memory"
            )
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(f"{SECTION}.context_dir needs prefix caching: set --enable-prefix-caching")
    if reason := _model_reason(vllm_config):
        raise ValueError(f"{SECTION}.context_dir needs {reason}")
    folder = Path(options.context_dir).expanduser()
    expected = f"{SECTION}.context_dir: {options.context_dir!r} was given, expected a folder "
    from vllm_relay.sparse.contexts.disk.context_folder import make_private_folder

    try:
        make_private_folder(folder)
    except OSError as error:
        raise ValueError(f"{expected}that is there or can be made: {error}") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{expected}that can be read and written: change its permissions")


def check_contexts(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse ``contexts`` that no engine of this configuration can keep. Raises ValueError: with
    the reason and the way out."""
    engines, reason = vllm_config.parallel_config.data_parallel_size, _model_reason(vllm_config)
    check_texts(
        vllm_config,
        "contexts",
        options.contexts,
        (reason is None, reason or ""),
        (engines == 1, "one engine: set --data-parallel-size 1"),
        instead="keep token ids with vllm_relay.long_context.client.keep_context",
    )


def _model_reason(vllm_config: VllmConfig) -> str | None:
    """What contexts need and the model lacks; None: nothing that is known before it is loaded."""
    model_config = vllm_config.model_config
    if model_config is not None and (model_config.is_hybrid or model_config.is_attention_free):
        return (
            "keys and values of all layers, and the model has layers with a state instead: "
            "leave it out"
        )
    return None
