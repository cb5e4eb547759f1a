# SPDX-License-Identifier: Apache-2.0
"""A real instruct model, SmolLM2-135M-Instruct, from the package index, and chats to ask it."""
