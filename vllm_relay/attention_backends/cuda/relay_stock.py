# SPDX-License-Identifier: Apache-2.0
"""RELAY on CUDA beside each of vLLM's backends that prompts may be left to."""

from __future__ import annotations

import functools
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_relay.attention_backends.cuda.relay import RelayCudaBackend
from vllm_relay.attention_backends.cuda.relay_choice import STOCK_PATHS


@functools.cache
def backend_beside(name: str, base: type[RelayCudaBackend]) -> Any:
    """`base`, its metadata builder and its layers, with prompts by a stock backend.

    Args:
        name: of the class; what is before "Backend" ends with a key of `STOCK_PATHS`.

    Raises:
        AttributeError: there is no such class.
    """
    kind = name.removesuffix("Backend")
    path = next((path for key, path in STOCK_PATHS.items() if kind.endswith(key)), None)
    if path is None or kind == name:
        raise AttributeError(f"no backend {name}: it ends with one of {', '.join(STOCK_PATHS)}")
    stock = resolve_obj_by_qualname(path)
    members = {
        "stock": stock,
        "impl_cls": type(f"{kind}Impl", (base.impl_cls,), {"stock_impl_cls": stock.get_impl_cls()}),
        "builder_cls": type(
            f"{kind}MetadataBuilder",
            (base.builder_cls,),
            {"stock_builder_cls": stock.get_builder_cls()},
        ),
        "supports_batch_invariance": classmethod(lambda cls: False),
    }
    return type(name, (base,), members)


def __getattr__(name: str) -> Any:
    return backend_beside(name, RelayCudaBackend)
