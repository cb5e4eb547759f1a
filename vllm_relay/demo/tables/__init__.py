# SPDX-License-Identifier: Apache-2.0
"""A question asked of every row of a table: row by row against llm_map."""
