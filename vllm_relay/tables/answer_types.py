# SPDX-License-Identifier: Apache-2.0
"""What users say answers are: types of Python and models of pydantic beside names and schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_relay.tables.outputs import Output
from vllm_relay.tables.texts import shortened

_NAMES_OF_TYPES: dict[Any, str] = {str: "text", int: "int", float: "float", bool: "bool"}


@dataclass(frozen=True)
class AnswerType:
    """
    Attributes:
        output: what the model is asked for; its check is that of `model`.
        model: that answers are instances of; None where there is none.
    """

    output: Output
    model: type[BaseModel] | None = None

    def instance(self, text: str) -> BaseModel:
        """The instance that the text of an answer stands for.

        Raises:
            ValidationError: it is none.
        """
        assert self.model is not None and self.output.struct is not None
        return self.model.model_validate_json(json.dumps(self.output.struct.answered(text)))

    def check(self, text: str) -> str:
        """Why the text of an answer is no instance of the model; "" if it is one."""
        assert self.model is not None
        try:
            self.instance(text)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ")
                for each in error.errors(include_url=False)
            )
            return shortened(f"answer {text!r} is no {self.model.__name__}: {problems}")
        return ""


def answer_type(output: Any, choices: Sequence[str] | None) -> AnswerType:
    """
    Args:
        output: a type's name, a type of DuckDB of structs or lists, a type of Python, a pydantic
            model, a JSON schema or an `Output`; None means "text".
        choices: the texts that are allowed; None allows all.

    Raises:
        TypeError: `output` or `choices` is nothing of these.
        ValueError: the type is not known, choices or a schema do not go with it, or a schema or a
            model determines no type of a column.
    """
    if isinstance(choices, str):
        raise TypeError(f"choices={choices!r} given, expected a list of texts")
    if output is None or isinstance(output, str):
        return AnswerType(Output.of(output, choices))
    if isinstance(output, Output):
        if choices is not None:
            raise ValueError(f"choices={choices!r} given beside an Output: put them in there")
        return AnswerType(output)
    if isinstance(output, type) and issubclass(output, BaseModel):
        types = AnswerType(Output.of("struct", choices, output.model_json_schema()), output)
        return replace(types, output=replace(types.output, check=types.check))
    if isinstance(output, Mapping):
        return AnswerType(Output.of("struct", choices, output))
    if isinstance(output, type) and output in _NAMES_OF_TYPES:
        return AnswerType(Output.of(_NAMES_OF_TYPES[output], choices))
    raise TypeError(
        f"output={output!r} given, expected the name of a type, one of str, int, float and bool, a "
        f"pydantic model, a JSON schema or an Output"
    )
