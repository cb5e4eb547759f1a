# SPDX-License-Identifier: Apache-2.0
"""Distinct rows and their answers: of a table in memory (Arrow), of a DuckDB query."""
