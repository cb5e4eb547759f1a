# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix attention for vLLM."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-relay")
except PackageNotFoundError:  # a checkout on PYTHONPATH
    __version__ = "unknown"
