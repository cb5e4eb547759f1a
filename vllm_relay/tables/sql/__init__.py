# SPDX-License-Identifier: Apache-2.0
"""SQL over DuckDB that calls llm(): the model is asked last, and about as little as possible.

llm() is a function of DuckDB over the answers that are known so far. The statement runs as the user
wrote it, with its calls replaced; what is unknown is collected, asked, and the statement runs again
until nothing is missing. So DuckDB's own optimiser leaves out what nobody needs.

calls.py, expressions.py   a call and its arguments, and what is wrong with them   (sqlglot)
text/           where things are in the text of a statement, and that text with parts replaced
rewrites/       small changes of the text after which fewer rows are asked about
replay/         functions and their answers, runs of a statement, limits, samples  (DuckDB)
targets.py      what a statement writes, and where that cannot be
jobs.py, explain.py   what answers: jobs, or an estimate
connection.py, result.py, database.py   connect()
"""

from vllm_relay.tables.sql.connection import Connection, connect
from vllm_relay.tables.sql.expressions import AnswerFailedError, SqlError
from vllm_relay.tables.sql.result import Result

__all__ = ["AnswerFailedError", "Connection", "Result", "SqlError", "connect"]
