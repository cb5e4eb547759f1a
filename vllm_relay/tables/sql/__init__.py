# SPDX-License-Identifier: Apache-2.0
"""SQL over DuckDB that calls llm(): the model is asked last, and about as little as possible.

calls.py, expressions.py, aliases.py, texts.py   a call and its arguments          (sqlglot)
checks.py, created_tables.py, copied_files.py, errors.py   what is wrong with a statement
plan.py, select_plan.py, stage.py, predicates.py, guards.py, qualify.py, groups.py, grouping.py,
pushdown.py, queries.py   which rows are asked about, in which order
binder.py, probe.py  what DuckDB says of names and types                           (DuckDB)
execute.py, temporary_tables.py, rows.py, error_columns.py   stages run            (DuckDB)
asker.py, jobs.py, runner.py, explain.py   what answers: jobs, or an estimate
connection.py, statements.py, result.py   connect()
"""

from vllm_relay.tables.sql.connection import Connection, connect
from vllm_relay.tables.sql.errors import AnswerFailedError, SqlError
from vllm_relay.tables.sql.result import Result

__all__ = ["AnswerFailedError", "Connection", "Result", "SqlError", "connect"]
