# SPDX-License-Identifier: Apache-2.0
"""Ask and replay: llm() is a function of DuckDB over the answers that are known so far.

The statement of the user runs as it is written, with its calls replaced. What is unknown is
collected while it runs; it is asked, and the statement runs again until nothing is missing.

structure.py, call_sites.py, conditions.py   where things are in the text
splices.py                                   the text with parts replaced
functions.py, answers.py                     what is known, for DuckDB, and what is missing
rewrite_*.py, limits.py, samples.py          fewer prompts
passes.py, statement.py, explain.py          runs
"""
