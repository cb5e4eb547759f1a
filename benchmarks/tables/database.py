# SPDX-License-Identifier: Apache-2.0
"""The tables of the queries, in files that every connection reads."""

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from benchmarks.tables.data import SOURCES, find_table
from benchmarks.tables.retrieval import made_questions, read_questions

FILM_FIELDS = ("link", "review", "title", "info", "id")


class Database:
    """The tables, in files that every connection reads."""

    def __init__(self, folder: Path, data: Path | None, rows: int) -> None:
        self._files = {
            name: folder / f"{name}.parquet" for name in ("films", "questions", "chosen")
        }
        connection = duckdb.connect()
        films, questions = load_films(data, rows), load_questions(data, rows)
        self.films, self.questions = films, questions
        tables = {
            "films": films,
            "questions": questions,
            "chosen": {"title": sorted(set(map(str, films["title"])))[::5]},
        }
        for name, table in tables.items():
            connection.register("made", pa.table(table))
            connection.execute(f"COPY (FROM made) TO '{self._files[name]}' (FORMAT parquet)")
        self.num_films = len(films["id"])
        self.texts = [
            str(cell) for table in tables.values() for cells in table.values() for cell in cells
        ]

    def connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        for name, path in self._files.items():
            connection.execute(f"CREATE VIEW {name} AS FROM '{path}'")
        return connection


def load_films(data: Path | None, rows: int) -> dict[str, list[Any]]:
    """All reviews of so many films that there are about as many rows, in the table's order."""
    source = SOURCES["movies_small"]
    if data is None:
        table = source.made(source.rows)
    else:
        found = find_table(source, data)
        if found is None:
            raise SystemExit(f"no {source.file} in the folder of --data or below: put it there")
        given = ("rotten_tomatoes_link", "review_content", "movie_title", "movie_info", "id")
        table = {new: found[old] for new, old in zip(FILM_FIELDS, given, strict=True)}
    titles = list(dict.fromkeys(table["title"]))
    chosen = set(titles[: max(1, round(len(titles) * rows / source.rows))])
    kept = [number for number, title in enumerate(table["title"]) if title in chosen]
    films: dict[str, list[Any]] = {
        name: [table[name][number] for number in kept] for name in FILM_FIELDS
    }
    films["id"] = list(map(int, films["id"]))
    return films


def load_questions(data: Path | None, rows: int) -> dict[str, list[Any]]:
    return made_questions(rows) if data is None else read_questions(data, rows)
