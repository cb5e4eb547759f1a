# SPDX-License-Identifier: Apache-2.0
"""Finds every place at which vllm-relay depends on vLLM, in the sources of both.

    python -m scripts.touch_points           # what of the installed vLLM differs from the table
    python -m scripts.touch_points --record  # writes it to the table
"""
