# SPDX-License-Identifier: Apache-2.0
"""What `llm_map` gives, also where it ends early, and what users say answers are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from vllm_relay.tables.jobs.options import TokenBudgetError
from vllm_relay.tables.jobs.report import JobReport
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


_ERRORS_SHOWN = 3
_ROWS_SHOWN = 10
_MAX_CELL_CHARS = 60


@dataclass(frozen=True, repr=False)
class MapResult:
    """A list of `objects`, with what else is known.

    Attributes:
        values: an answer for each row of the table, missing where there is none: a pandas Series
            with the table's index, a Polars Series or an Arrow ChunkedArray, named "answer". A
            model or a schema gives structs, type "json" gives texts.
        errors: why a row has no answer, or that its text was cut, by the row's place in the table,
            from 0.
        cut_rows: places of the rows whose answer ended at `max_tokens`; their texts are values as
            far as they came.
        report: what the job took.
        answer_type: of the values.
        arrow_values: the same values as an Arrow array.
        answers: the same, with structs as texts of JSON.
        num_near_duplicates: rows with the answer of a row that is not equal to them, see
            `NearDuplicates`.
    """

    values: Any
    errors: dict[int, str]
    cut_rows: list[int]
    report: JobReport
    answer_type: AnswerType
    arrow_values: pa.ChunkedArray
    answers: pa.ChunkedArray
    num_near_duplicates: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.arrow_values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.objects)

    def __getitem__(self, place: int) -> Any:
        return self.objects[place]

    def __repr__(self) -> str:
        """The first rows, and how many there are."""
        lines = [f"{len(self)} answers, {len(self.errors)} errors"]
        for place, value in enumerate(self.arrow_values.slice(0, _ROWS_SHOWN).to_pylist()):
            error = self.errors.get(place)
            told = "" if error is None else f"  # {shortened(error, _MAX_CELL_CHARS)}"
            lines.append(f"{place:>6}  {shortened(repr(value), _MAX_CELL_CHARS)}{told}")
        if len(self) > _ROWS_SHOWN:
            lines.append("   ...")
        return "\n".join(lines)

    @property
    def missing_rows(self) -> list[int]:
        """Places of the rows that have an error and no answer, not even one that was cut."""
        return [place for place in self.errors if not self.arrow_values[place].is_valid]

    @cached_property
    def objects(self) -> list[Any]:
        """The values as Python has them, None where there is none: instances of the pydantic model,
        dictionaries and lists where the output is JSON, else texts and numbers."""
        if self.answer_type.model is not None:
            parse: Callable[[str], Any] = self.answer_type.instance
        elif self.answer_type.output.type == "json":
            parse = json.loads
        else:
            return self.arrow_values.to_pylist()
        return [None if text is None else parse(text) for text in self.answers.to_pylist()]


class RowsFailedError(RuntimeError):
    """Rows have no answer, and ``on_error="raise"`` was given.

    Attributes:
        result: with the answers of the other rows.
    """

    def __init__(self, result: MapResult) -> None:
        missing = result.missing_rows
        shown = [(place, result.errors[place]) for place in missing[:_ERRORS_SHOWN]]
        more = len(missing) - len(shown)
        super().__init__(
            f"{len(missing)} of {len(result.arrow_values)} rows have no answer: "
            + "; ".join(f"row {place}: {error}" for place, error in shown)
            + (f"; and {more} more" if more else "")
        )
        self.result = result


class MapBudgetError(TokenBudgetError):
    """There are rows left, but no tokens to ask about them.

    Args:
        spent: what ended the job.
        result: see below.
        checkpoint: the file that keeps the answers too; None if there is none.

    Attributes:
        result: of the operator, with the answers that came: a `MapResult` of `llm_map`.
    """

    def __init__(self, spent: TokenBudgetError, result: Any, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            advice = (
                f"their answers are in this error's result, and the checkpoint {checkpoint} keeps "
                f"them: raise max_total_tokens and ask again to go on"
            )
        else:
            advice = (
                "their answers are in this error's result and nowhere else: raise "
                "max_total_tokens, and give a checkpoint, a file, so that a job that is stopped "
                "can go on"
            )
        super().__init__(spent.reason, advice, spent.limit)
        self.result = result
