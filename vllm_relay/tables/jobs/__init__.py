# SPDX-License-Identifier: Apache-2.0
"""A question asked of every distinct row of a table, to its end whatever happens on the way.

job_runner.py, estimate.py   answers, estimates: what the other packages call      (DuckDB)
job_rows.py, answer_table.py   rows out of DuckDB in buckets, answers into it      (DuckDB)
job_plan.py, job_run.py   the prompts of a job in their order; runs them           (numpy)
prompt_format.py, joined_tokens.py, set_fields.py   how a row becomes a prompt     (numpy)
module_cache.py, module_fields.py, module_layout.py, module_prompts.py, module_render.py
                     long values that rows share as prompt modules                 (numpy)
checkpoint.py        answers in an SQLite file
token_budget.py, progress.py, options.py   what a job may take, and how far it is
"""
