# SPDX-License-Identifier: Apache-2.0
"""LLM queries over tables: SQL and DataFrames whose rows become prompts.

Liu et al., "Optimizing LLM Queries in Relational Workloads", 2024.
"""
