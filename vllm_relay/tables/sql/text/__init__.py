# SPDX-License-Identifier: Apache-2.0
"""The text of a statement; sqlglot's tokens tell where things are in it, and write nothing.

structure.py, sources.py, conditions.py   queries, their clauses and tables, AND and OR
call_sites.py   calls of llm()
splices.py      the text with parts replaced
edited.py       the text with functions for calls
answer_columns.py   columns that hold answers, and what reads them
"""
