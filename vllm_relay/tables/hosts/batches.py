# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a batch, in a process of a host's: what hosts have in common."""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vllm_relay.tables.dataframes import llm_map
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.opening import open_engine
from vllm_relay.tables.jobs.answers import ARROW_TYPES
from vllm_relay.tables.map_result import answer_type
from vllm_relay.tables.question import placeholders_of

SAMPLE_ROWS = 1000
"""Of which the column is chosen that rows are sorted by."""
_HERE_ONLY = frozenset({"checkpoint", "max_total_tokens", "on_error", "replicas", "show_progress"})
_OPTIONS = [
    name
    for name, each in inspect.signature(llm_map).parameters.items()
    if each.kind is each.KEYWORD_ONLY and name != "engine"
]

_opening = Lock()
_opened: dict[str, Engine] = {}
"""Of this process, by what they are opened with."""


@dataclass(frozen=True)
class BatchQuestion:
    """A question that can be sent to another process.

    Args:
        prompt: see `llm_map`.
        fields: columns that the prompt holds; None takes those that it names.
        engine: a server's address, or several, or a model, see `open_engine`. Each process opens
            its own when it gets its first batch, and keeps it.
        engine_arguments: of a server, see `ServerEngine`, or of a model, those of ``vllm.LLM``.
        into: a new column for the answers.
        errors_into: a new column for why a row has none; None for none.
        options: others of `llm_map`.

    Raises:
        TypeError: the engine is none that another process could open, or an option is none of
            `llm_map`.
        ValueError: an option is none that holds for batches, or the prompt names no column.
    """

    prompt: str
    fields: Sequence[str] | None
    engine: Any
    engine_arguments: Mapping[str, Any] | None = None
    into: str = "answer"
    errors_into: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_named = isinstance(self.engine, str) or (
            isinstance(self.engine, Sequence)
            and len(self.engine) > 0
            and all(isinstance(each, str) for each in self.engine)
        )
        if not is_named:
            raise TypeError(
                f"engine {self.engine!r} given, expected a model or a server's address: each "
                "worker opens its own"
            )
        unknown = sorted(self.options.keys() - set(_OPTIONS))
        if unknown:
            known = sorted(set(_OPTIONS) - _HERE_ONLY)
            raise TypeError(f"{unknown} given, which are no options, expected some of {known}")
        refused = sorted(_HERE_ONLY & self.options.keys())
        if refused:
            raise ValueError(
                f"{refused} given, which hold for one table in one process: leave them out, or "
                "use vllm_relay.tables.llm_map"
            )
        if not self.columns:
            raise ValueError(
                f"prompt {self.prompt!r} names no column and fields are not given: write a name in "
                "braces, or give fields"
            )
        # of what cannot be, before a cluster is at work
        answer_type(self.options.get("output"), self.options.get("choices"))

    @property
    def columns(self) -> tuple[str, ...]:
        """That are asked about."""
        return tuple(placeholders_of(self.prompt) if self.fields is None else self.fields)

    @cached_property
    def answer_fields(self) -> list[pa.Field]:
        """The columns that come with the answers."""
        output = answer_type(self.options.get("output"), self.options.get("choices")).output
        type = ARROW_TYPES[output.type]
        if output.struct is not None:
            type = _plain(output.struct.arrow_type)
        fields = [pa.field(self.into, type)]
        if self.errors_into is not None:
            fields.append(pa.field(self.errors_into, pa.string()))
        return fields

    def check(
        self,
        names: Sequence[str],
        sort_by: str | None = None,
        sortable: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            names: of the host's columns.
            sort_by: one of `sortable`, of all by default; "auto" or None.

        Raises:
            ValueError: a field is no column, an answer's column is one, or `sort_by` is none.
        """
        unknown = [name for name in self.columns if name not in names]
        if unknown:
            raise ValueError(f"{unknown} are no columns, expected some of {list(names)}")
        if self.into == self.errors_into:
            raise ValueError(f"into and errors_into are both {self.into!r}: give two names")
        taken = [each.name for each in self.answer_fields if each.name in names]
        if taken:
            raise ValueError(
                f"column {taken[0]!r} is there already: give another name with into or errors_into"
            )
        known = list(names if sortable is None else sortable)
        if sort_by not in (None, "auto", *known):
            raise ValueError(f"sort_by={sort_by!r} given, expected one of {known}, or 'auto'")

    def ask(self, batch: pa.Table) -> pa.Table:
        """The batch with its answers."""
        if not batch.num_rows:
            result = [pa.array([], each.type) for each in self.answer_fields]
        else:
            found = llm_map(
                batch.select(list(dict.fromkeys(self.columns))),
                self.prompt,
                self.columns,
                engine=self._engine(),
                show_progress=False,
                **self.options,
            )
            errors = [found.errors.get(row) for row in range(batch.num_rows)]
            values = found.arrow_values.cast(self.answer_fields[0].type)
            result = [values, pa.array(errors, pa.string())][: len(self.answer_fields)]
        for each, column in zip(self.answer_fields, result, strict=True):
            batch = batch.append_column(each, column)
        return batch

    def _engine(self) -> Engine:
        arguments = dict(self.engine_arguments or {})
        key = repr((self.engine, sorted(arguments.items())))
        with _opening:
            if key not in _opened:
                _opened[key] = opened = open_engine(self.engine, **arguments)
                atexit.register(opened.close)
            return _opened[key]


def _plain(type: pa.DataType) -> pa.DataType:
    """A type with texts instead of dictionaries, which not all hosts have within others."""
    if pa.types.is_struct(type):
        return pa.struct([pa.field(each.name, _plain(each.type)) for each in type])
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_plain(type.value_type)))
    return type.value_type if pa.types.is_dictionary(type) else type


def host_module(name: str, extra: str) -> ModuleType:
    """A host's package.

    Raises:
        ImportError: it is not installed; says how it is.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is not installed: run pip install 'vllm-relay[{extra}]'"
        ) from error


def leading_field(sample: pa.Table, fields: Sequence[str]) -> str | None:
    """The column whose values save most where they come first, of rows that are sorted by it: its
    bytes, over how many different ones there are (Liu et al., 2024, Algorithm 1). Lists and structs
    are none that all hosts can sort by; None if there are no others."""

    def savings(name: str) -> float:
        column = sample[name]
        is_bytes = pa.types.is_binary(column.type)
        texts = _texts(column) if is_bytes else column.cast(pa.string(), safe=False)
        num_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
        return num_bytes / max(pc.count_distinct(texts, mode="all").as_py(), 1)

    sortable = [name for name in fields if not pa.types.is_nested(sample[name].type)]
    return max(dict.fromkeys(sortable), key=savings, default=None)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array([repr(each) for each in column.to_pylist()], pa.string())])
