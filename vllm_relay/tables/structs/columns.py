# SPDX-License-Identifier: Apache-2.0
"""Answers checked against their schema, and their texts as columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jsonschema import FormatChecker, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from vllm_relay.tables.structs.schemas import column_type
from vllm_relay.tables.structs.types import ValueRangeError, answered, stored

if TYPE_CHECKING:
    import pyarrow as pa


class StructColumn:
    """A column of structs or lists.

    Args:
        schema: of its values.

    Attributes:
        type: of its values.

    Raises:
        ValueError: the schema is none, or determines no type.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        validator = validator_for(schema, default=Draft202012Validator)
        try:
            validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"JSON schema given: {error.json_path}: {error.message}") from None
        # what a schema refers to elsewhere is not fetched
        self._validator = validator(
            schema, registry=Registry(), format_checker=FormatChecker(["date"])
        )
        self.type = column_type(
            schema, lambda part, value: self._validator.evolve(schema=part).is_valid(value)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # validators cannot be sent to other processes
        return StructColumn, (self._schema,)

    @property
    def sql_type(self) -> str:
        """DuckDB's name of the type."""
        return self.type.sql

    def text(self, answer: Any) -> str:
        """The JSON that the column holds of an answer: every property is there, in the order of the
        fields; what the answer leaves out has the schema's default, or is null.

        Raises:
            ValueError: the answer does not fit the schema, or a type cannot hold its part.
        """
        found: ValidationError | None = best_match(self._validator.iter_errors(answer))
        if found is not None:
            raise ValueError(f"{found.json_path}: {found.message}")
        try:
            return json.dumps(stored(self.type, answer), ensure_ascii=False)
        except ValueRangeError as error:
            raise ValueError(str(error)) from None

    def answered(self, text: str) -> Any:
        """The answer that a text of `text` was made from, but for defaults; null where the answer
        left out what may be null."""
        return answered(self.type, json.loads(text))

    @property
    def arrow_type(self) -> pa.DataType:
        """Of what `arrow` gives."""
        import pyarrow

        return self.arrow(pyarrow.chunked_array([], pyarrow.string())).type

    def arrow(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """The column of texts that were made by `text`, or are missing."""
        import duckdb
        import pyarrow

        given = pyarrow.table({"value": texts})
        with duckdb.connect() as connection:
            connection.register("given", given)
            found = connection.sql(f"SELECT value::JSON::{self.sql_type} AS value FROM given")
            return found.to_arrow_table()["value"]
