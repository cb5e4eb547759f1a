# SPDX-License-Identifier: Apache-2.0
"""Loads one file of vLLM without vLLM: small modules stand in for what that file imports."""

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language

OPS = "vllm.v1.attention.ops"


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class Platform:
    """Says no to whatever is asked about special GPUs."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: False


class Settings(types.ModuleType):
    """Environment variables, none of which is set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def load_op(path: Path) -> types.ModuleType:
    """The module in a file of vLLM's `v1/attention/ops`; files beside it may be imported by it.

    Raises:
        ImportError: it needs more than there are stand-ins for.
    """
    with _stand_ins(path.parent):
        name = f"{OPS}.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


@contextlib.contextmanager
def _stand_ins(ops_folder: Path) -> Iterator[None]:
    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    envs = Settings("vllm.envs")
    packages = {"vllm.v1": [], "vllm.v1.attention": [], OPS: [str(ops_folder)]}
    modules = {name: module(name, __path__=path) for name, path in packages.items()}
    modules |= {
        "vllm": module("vllm", __path__=[], envs=envs),
        "vllm.envs": envs,
        "vllm.logger": module("vllm.logger", init_logger=logging.getLogger),
        "vllm.platforms": module("vllm.platforms", current_platform=Platform()),
        "vllm.triton_utils": module("vllm.triton_utils", triton=triton, tl=triton.language),
        "vllm.v1.kv_cache_interface": module("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode),
    }
    before = {name: found for name, found in sys.modules.items() if _is_vllm(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_vllm(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_vllm(name: str) -> bool:
    return name == "vllm" or name.startswith("vllm.")
