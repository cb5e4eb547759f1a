# SPDX-License-Identifier: Apache-2.0
"""SQL over DuckDB that calls llm(): the model is asked last, and about as little as possible."""

from vllm_relay.tables.sql.connection import Connection, connect
from vllm_relay.tables.sql.errors import AnswerFailedError, SqlError
from vllm_relay.tables.sql.result import Result

__all__ = ["AnswerFailedError", "Connection", "Result", "SqlError", "connect"]
