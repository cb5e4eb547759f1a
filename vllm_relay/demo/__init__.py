# SPDX-License-Identifier: Apache-2.0
"""The demo: one workload answered by stock vLLM and by vLLM with relay, side by side."""
