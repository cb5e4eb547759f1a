# SPDX-License-Identifier: Apache-2.0
"""What front ends ask the engine core: one error, one way there and back, and the prompts that are
asked for."""
