# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix attention for vLLM."""

from importlib.metadata import version

__version__ = version("vllm-relay")
