# SPDX-License-Identifier: Apache-2.0
"""Every change vllm-relay makes to vLLM: one file for each seam, one function for each change, with
its reason and when it can go.

All functions are idempotent, and the replaced functions pass on arguments they do not know. They
know nothing of what is done with the change: they are given the functions to call, by
`vllm_relay.wiring` or by who runs in the process.
"""
