# SPDX-License-Identifier: Apache-2.0
"""A question asked of every distinct row of a table, to its end whatever happens on the way.

job_runner.py, estimate.py   answers, estimates: what the other packages call      (DuckDB)
job_rows.py, answer_table.py   rows out of DuckDB in buckets, answers into it      (DuckDB)
asking.py            `ask`: the same of a table in memory                          (Arrow)
job_plan.py, job_run.py   what becomes of each row of a bucket; runs the prompts   (Arrow)
planner.py           `plan_prompts`: the prompts of a bucket in their order        (Arrow)
answers.py, answer_length.py   what completions say, and how long they may be
prompt_format.py, joined_tokens.py, set_fields.py   how a row becomes a prompt     (numpy)
modules/             long values that rows share as prompt modules                 (numpy)
checkpoint.py        answers in an SQLite file
token_budget.py, progress.py, options.py   what a job may take, and how far it is
"""
