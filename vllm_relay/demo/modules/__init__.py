# SPDX-License-Identifier: Apache-2.0
"""Prompts of parts in changing order: prefix caching against prompt modules."""
