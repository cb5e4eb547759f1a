# SPDX-License-Identifier: Apache-2.0
"""Which backend a layer gets, and when a configuration is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


class RefusedError(ValueError):
    """A configuration that ``run_on_new_config`` was told to refuse, with the reason."""


def pickle_backend_by_restoring(member: Any, restore: Callable[[], Any]) -> None:
    """Unpickle the dynamic enum member ``member`` by calling ``restore()``.

    Reason: an enum member pickles by value, and a spawned process unpickles VllmConfig before it
    loads plugins: "'...RelayBackend' is not a valid AttentionBackendEnum".
    Remove when: vLLM loads general plugins before it unpickles in a spawned process.
    """
    # both picklers look __reduce_ex__ up on the object, so an instance attribute is enough
    member.__reduce_ex__ = lambda protocol: (restore, ())


def let_platform_select(
    platform_cls: type, path_for_layer: Mapping[str, Callable[[Any, Any], str]]
) -> None:
    """Make a platform return ``path_for_layer[name](backend, selector_config)`` for the layers that
    are to run on the backend ``name``; it raises where the backend cannot serve the layer.

    Reason: CpuPlatform.get_attn_backend_cls falls back to CPU_ATTN, or an MLA backend, for any
    backend it does not know, with no more than a log line. CudaPlatform takes the one class that is
    registered, and which of vLLM's own backends prompts are left to depends on the layer.
    Remove when: platforms honour registered backends, and a backend may choose its class by layer.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            find_path = path_for_layer.get(getattr(selected_backend, "name", ""))
            if find_path is None:
                return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
            return find_path(selected_backend, attn_selector_config)

        return get_attn_backend_cls

    wrap(platform_cls, "get_attn_backend_cls", make)


def run_on_new_config(platform_cls: type, on_config: Callable[[Any], None]) -> None:
    """Call ``on_config(vllm_config)`` when the front end has built a configuration. Its ValueError
    refuses the configuration, as a RefusedError.

    Reason: a wrong option must stop start-up in the user's process, not in a worker whose traceback
    arrives as "engine core initialization failed"; plugins have no hook for it. The platform's hook
    is the last thing VllmConfig runs that every platform has.
    Remove when: vLLM calls plugins with the finished VllmConfig.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_update_config(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(cls, vllm_config, *args, **kwargs)
            try:
                on_config(vllm_config)
            except ValueError as error:
                raise RefusedError(str(error)) from error

        return check_and_update_config

    wrap(platform_cls, "check_and_update_config", make)
