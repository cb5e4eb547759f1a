# SPDX-License-Identifier: Apache-2.0
"""Runs of a statement, until all answers that it needs are known.

functions.py, answers.py   what is known, for DuckDB, and what is missing
passes.py       the runs
replayed.py     a statement with its tables and answers
limits.py       of a SELECT with a LIMIT, only up to it
samples.py      the order of conditions that ask
statement.py    kinds of statements, and what is wrong with one
"""
