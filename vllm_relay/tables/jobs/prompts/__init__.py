# SPDX-License-Identifier: Apache-2.0
"""Rows become prompts, in the order in which they are to run. Neither DuckDB nor an engine is here.

planner.py           `plan_prompts`: a prompt for every row of a table
format.py            a question and the fields of a row as one text
joined_tokens.py     the tokens of a prompt from those of its fields
set_fields.py        fields whose values are lists in any order
modules/             long values that rows share as prompt modules
"""
