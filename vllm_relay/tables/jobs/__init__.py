# SPDX-License-Identifier: Apache-2.0
"""A question asked of every distinct row of a table, to its end whatever happens on the way.

asking.py            `ask` once, `Asker` again and again
rows.py              the distinct rows, and their answers                          (Arrow)
job_plan.py, job_run.py   what becomes of each row of a bucket; runs the prompts
prompts/             rows become prompts                                           (numpy)
answers.py           what completions say, and how long they may be
arrow_texts.py       columns of texts in Arrow, read where they are
checkpoint.py        answers in an SQLite file
report.py, estimating.py   what a job took, and what one is expected to take
options.py           how a job runs, and what it may take
"""
