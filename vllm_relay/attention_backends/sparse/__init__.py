# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE backend: RELAY beside `vllm_relay.long_context`, on CPUs and on CUDA."""
