# SPDX-License-Identifier: Apache-2.0
"""JSON answers as columns of structs and lists.

types.py             what a column holds, and the values of an answer in it            (pure)
schemas.py           the type of a column, from a JSON schema or as DuckDB writes it; answers
                     checked against it, and their texts as columns
"""
