# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of RELAY on NVIDIA GPUs."""
