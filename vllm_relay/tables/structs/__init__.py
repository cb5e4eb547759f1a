# SPDX-License-Identifier: Apache-2.0
"""JSON answers as columns of structs and lists.

types.py             what a column holds, and the values of an answer in it            (pure)
schemas.py           the type of a column, from a JSON schema                          (pure)
duckdb_types.py      a JSON schema from a type that is written out                     (DuckDB)
columns.py           answers checked against their schema, and their texts as columns  (DuckDB)
"""
