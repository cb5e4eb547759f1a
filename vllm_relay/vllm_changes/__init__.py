# SPDX-License-Identifier: Apache-2.0
"""Every change made to vLLM, and every place at which vllm-relay depends on it."""
