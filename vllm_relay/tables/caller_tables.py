# SPDX-License-Identifier: Apache-2.0
"""Tables of pandas, Polars and Arrow: their columns as Arrow's, and values in their kind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from vllm_relay.tables.images import ImageFields, referred
from vllm_relay.tables.jobs.arrow_texts import is_bytes
from vllm_relay.tables.outputs import well_formed
from vllm_relay.tables.texts import shortened

ANSWER_NAME = "answer"
"""Of the Series that values become."""

_EXTENSIONS_WITH_TEXT = ("arrow.bool8", "arrow.json", "arrow.uuid")
_MAX_DECIMAL_DIGITS = 38


class CallerTable(Protocol):
    """
    Attributes:
        names: of the columns, in their order.
        num_rows: of the table.
    """

    names: list[Any]
    num_rows: int

    def column(self, place: int) -> pa.ChunkedArray:
        """
        Raises:
            pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError: Arrow has
                no type for it.
        """
        ...

    def texts(self, place: int) -> Iterable[Any]:
        """The values of a column that Arrow does not take."""
        ...

    def values(self, column: pa.ChunkedArray) -> Any:
        """One value for each row, in the kind of the table."""
        ...

    def rows(self, places: Sequence[int]) -> Any:
        """Some rows as a table of this kind, with its types and its index."""
        ...

    def groups(self, places: Sequence[int], names: Sequence[str], column: pa.ChunkedArray) -> Any:
        """Some columns of some rows as a table of this kind, and a column `ANSWER_NAME`."""
        ...


class _ArrowTable:
    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.names = list(table.column_names)
        self.num_rows = table.num_rows

    def column(self, place: int) -> pa.ChunkedArray:
        return self._table.column(place)

    def texts(self, place: int) -> Iterable[Any]:
        return ()

    def values(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        return column

    def rows(self, places: Sequence[int]) -> pa.Table:
        return self._table.take(pa.array(places, pa.int64()))

    def groups(
        self, places: Sequence[int], names: Sequence[str], column: pa.ChunkedArray
    ) -> pa.Table:
        kept = self._table.select(list(names)).take(pa.array(places, pa.int64()))
        columns = [*kept.columns, column]
        return pa.table(columns, names=[*names, ANSWER_NAME])


class _PandasTable:
    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.names = list(frame.columns)
        self.num_rows = len(frame)

    def column(self, place: int) -> pa.ChunkedArray:
        series = self._frame.iloc[:, place]
        if isinstance(series.dtype, sys.modules["pandas"].SparseDtype):
            series = series.sparse.to_dense()
        array = pa.array(series, from_pandas=True)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])

    def texts(self, place: int) -> Iterable[Any]:
        return self._frame.iloc[:, place]

    def values(self, column: pa.ChunkedArray) -> Any:
        pandas = sys.modules["pandas"]
        # integers and truth values that may be missing stay what they are
        types = {pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}
        series = column.to_pandas(types_mapper=types.get)
        series.index = self._frame.index
        return series.rename(ANSWER_NAME)

    def rows(self, places: Sequence[int]) -> Any:
        return self._frame.iloc[list(places)]

    def groups(self, places: Sequence[int], names: Sequence[str], column: pa.ChunkedArray) -> Any:
        if names:
            kept = self._frame[list(names)].iloc[list(places)].reset_index(drop=True)
        else:
            kept = sys.modules["pandas"].DataFrame(index=range(len(column)))
        return kept.assign(**{ANSWER_NAME: _PandasTable(kept).values(column)})


class _PolarsTable:
    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.names = list(frame.columns)
        self.num_rows = frame.height

    def column(self, place: int) -> pa.ChunkedArray:
        import polars as pl

        series = self._frame.to_series(place)
        if series.dtype == pl.Object:
            raise TypeError("its values are Python objects")
        return pa.chunked_array([series.to_arrow()])

    def texts(self, place: int) -> Iterable[Any]:
        return ()

    def values(self, column: pa.ChunkedArray) -> Any:
        import polars as pl

        return pl.Series(ANSWER_NAME, column)

    def rows(self, places: Sequence[int]) -> Any:
        return self._frame[list(places)]

    def groups(self, places: Sequence[int], names: Sequence[str], column: pa.ChunkedArray) -> Any:
        made = self.values(column)
        if not names:
            return made.to_frame()
        return self._frame.select(list(names))[list(places)].with_columns(made)


def names_beside(left: CallerTable, right: CallerTable) -> tuple[list[Any], list[Any]]:
    """The names of two tables' columns side by side: those of both end with ":left" and ":right".

    Raises:
        ValueError: such a name is there already.
    """
    both = set(left.names) & set(right.names)
    for name in both:
        for taken in (f"{name}:left", f"{name}:right"):
            if taken in left.names or taken in right.names:
                raise ValueError(
                    f"tables given that both have a column {name!r}, and one of them {taken!r}, "
                    f"which the result needs: rename it"
                )
    named = (
        [f"{name}:{side}" if name in both else name for name in table.names]
        for side, table in (("left", left), ("right", right))
    )
    return next(named), next(named)


def beside(left: Any, right: Any) -> Any:
    """Two tables of one kind with as many rows, side by side, see `names_beside`."""
    renamed = names_beside(caller_table(left), caller_table(right))
    if isinstance(left, pa.Table):
        return pa.table([*left.columns, *right.columns], names=[*renamed[0], *renamed[1]])
    if hasattr(left, "hstack"):
        columns = [*left.get_columns(), *right.get_columns()]
        names = [*renamed[0], *renamed[1]]
        return type(left)([each.rename(name) for each, name in zip(columns, names, strict=True)])
    frames = [
        each.reset_index(drop=True).set_axis(own, axis=1)
        for each, own in zip((left, right), renamed, strict=True)
    ]
    return sys.modules["pandas"].concat(frames, axis=1)


def caller_table(table: Any) -> CallerTable:
    """
    Raises:
        TypeError: it is no table of pandas, Polars or Arrow.
    """
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if pandas is not None and isinstance(table, pandas.DataFrame):
        return _PandasTable(table)
    if polars is not None and isinstance(table, polars.DataFrame):
        return _PolarsTable(table)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if isinstance(table, pa.Table):
        return _ArrowTable(table)
    given = f"a table of type {type(table).__module__}.{type(table).__qualname__}"
    if polars is not None and isinstance(table, polars.LazyFrame):
        raise TypeError(f"{given} given, expected a DataFrame: give table.collect()")
    raise TypeError(
        f"{given} given, expected a pandas or Polars DataFrame or an Arrow table: give "
        f"pyarrow.table(...) of it"
    )


def arrow_columns(
    table: CallerTable, fields: Sequence[str], images: ImageFields | None = None
) -> list[pa.ChunkedArray]:
    """
    Args:
        images: those of the fields that are images: their columns are of references.

    Raises:
        ValueError: a field is no column or several, or its values have no text or are no images.
    """
    return [_arrow_column(table, name, images) for name in fields]


def _arrow_column(table: CallerTable, name: str, images: ImageFields | None) -> pa.ChunkedArray:
    names = table.names
    # names may be anything in pandas, also what cannot be compared
    places = [i for i, each in enumerate(names) if isinstance(each, str) and each == name]
    if len(places) != 1:
        found = "no column" if not places else f"the name of {len(places)} columns"
        raise ValueError(
            f"field {name!r} given, which is {found} of the table: expected one of {names}"
            + (", each once" if places else "")
        )
    try:
        column = table.column(places[0])
    except UnicodeEncodeError as error:
        raise ValueError(
            f"column {name!r} has a text that cannot be UTF-8{_first_bad(table, places[0])} "
            f"({error.reason}): clean it, as with text.encode('utf-8', 'replace').decode()"
        ) from None
    except (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ValueError(
            f"column {name!r} has values that Arrow cannot hold in one type "
            f"({shortened(str(error))}): convert it to text or to one type, or leave it out of "
            f"fields"
        ) from None
    kind = None if images is None else images.kind_of(name)
    if images is not None and kind is not None:
        return referred(name, column, kind, images.store)
    reason = _reason_against(column.type)
    if reason:
        raise ValueError(
            f"column {name!r} of type {column.type} given: {reason}, or leave it out of fields"
        )
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    return column


def _first_bad(table: CallerTable, place: int) -> str:
    """Where the first text is that cannot be UTF-8."""
    for row, text in enumerate(table.texts(place)):
        if isinstance(text, str) and text != well_formed(text):
            return f" in row {row}: {shortened(ascii(text))}"
    return ""


def _reason_against(type: pa.DataType, *, is_nested: bool = False) -> str:
    """What to do about a type that a prompt cannot show as it is; "" if it can."""
    types = pa.types
    if isinstance(type, pa.BaseExtensionType):
        if type.extension_name in _EXTENSIONS_WITH_TEXT:
            return ""
        return "its values have no text that DuckDB knows; convert them to text"
    if is_bytes(type):
        return "bytes are no text; decode them, or give images=[...] if they are images"
    if types.is_decimal256(type):
        return f"decimals have up to {_MAX_DECIMAL_DIGITS} digits; cast it to decimal128"
    if types.is_union(type) or (is_nested and types.is_float16(type)):
        return "DuckDB has no such type; convert it to text"
    if types.is_dictionary(type) or types.is_run_end_encoded(type):
        return _reason_against(type.value_type, is_nested=True)
    children = (type.field(number).type for number in range(type.num_fields))
    return next(filter(None, (_reason_against(each, is_nested=True) for each in children)), "")
