# SPDX-License-Identifier: Apache-2.0
"""Long contexts in vLLM: a window on the device, the rest in host memory, searched by indexes."""
