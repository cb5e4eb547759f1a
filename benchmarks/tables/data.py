# SPDX-License-Identifier: Apache-2.0
"""The tables of the papers from a folder, or made ones of the same shape."""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Table = dict[str, list[str | None]]

_NULLS = {"", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"}


@dataclass(frozen=True)
class Source:
    """A table that was measured with published orders.

    Attributes:
        file: its name in the folder.
        equivalent: fields that determine each other, which greedy group recursion is given.
        bar, aim: hit rate in percent; the bar is the best that published orders reach.
        made: a table of its shape, from the number of its rows.
    """

    file: str
    rows: int
    equivalent: tuple[tuple[str, ...], ...]
    bar: float
    aim: float
    made: Callable[[int], Table]


def read_table(path: Path) -> Table:
    """A CSV file, with the texts that pandas has for its numbers."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = [row for row in csv.reader(file) if row]
    cells = zip(*rows, strict=True)
    return {name: _as_read(list(column)) for name, column in zip(names, cells, strict=True)}


def _as_read(cells: list[str]) -> list[str | None]:
    texts = [None if cell in _NULLS else cell for cell in cells]
    known = [text for text in texts if text is not None]
    try:
        numbers = [float(text) for text in known]
    except ValueError:
        return list(texts)
    whole = all(text.lstrip("-").isdigit() for text in known)
    if whole and len(known) == len(texts):
        return [str(int(text)) for text in known]
    # integers with gaps become floats
    decimals = iter(numbers)
    return [None if text is None else str(next(decimals)) for text in texts]


class _Maker:
    """Columns of random texts."""

    def __init__(self, rows: int) -> None:
        self.rng = np.random.default_rng(0)
        self.rows = rows

    def values(self, num_values: int, skew: float = 1.0) -> np.ndarray:
        """Numbers of values, the first ones the most frequent: [rows]."""
        weights = 1 / np.arange(1, num_values + 1) ** skew
        return self.rng.choice(num_values, self.rows, p=weights / weights.sum())

    def texts(self, values: np.ndarray, length: int) -> list[str]:
        """Distinct texts of about this many characters for distinct values."""
        letters = np.array(list("etaoin shrdlu"))
        made: dict[int, str] = {}
        for value in np.unique(values).tolist():
            random = "".join(self.rng.choice(letters, max(0, length - len(str(value)))))
            made[value] = f"{random[: length // 3]}{value}{random[length // 3 :]}"
        return [made[value] for value in values.tolist()]

    def ratings(self, quality: np.ndarray, best: int, noise: float) -> list[str]:
        """Marks from 1 to `best` near a quality from 0 to 1."""
        noisy = quality + self.rng.normal(0, noise, self.rows)
        marks = np.clip(np.rint(noisy * best), 1, best).astype(int)
        return [f"{mark}/{best}" for mark in marks.tolist()]


def made_reviews(rows: int) -> Table:
    """Reviews of things: a mark each for several qualities, with the thing's name and kind."""
    make = _Maker(rows)
    item = make.values(1423, 0.8)
    quality = np.clip(make.rng.normal(0.65, 0.12, 1423)[item], 0, 1)
    days = 900_000_000 + 86_400 * make.rng.integers(0, 3738, rows)
    return {
        "profile": make.texts(make.values(4862, 0.9), 8),
        "time": [str(day) for day in days.tolist()],
        "overall": make.ratings(quality, 20, 0.1),
        "taste": make.ratings(quality, 10, 0.1),
        "palate": make.ratings(quality, 5, 0.1),
        "appearance": make.ratings(quality, 5, 0.1),
        "name": make.texts(item, 29),
        "style": make.texts(item * 7919 % 78, 13),
        "item": [str(1000 + 31 * number) for number in item.tolist()],
    }


def made_characters(rows: int) -> Table:
    """Persons with a page each: names that nobody shares and few kinds of everything else."""
    make = _Maker(rows)
    number = make.rng.permutation(rows)
    month = make.values(833, 0.5)
    names = make.texts(number, 24)
    return {
        "page": [str(7 * each + 1000) for each in number.tolist()],
        "name": names,
        "address": [f"/{name.replace(' ', '_')}" for name in names],
        "identity": make.texts(make.values(5), 12),
        "side": make.texts(make.values(4), 13),
        "eyes": make.texts(make.values(25, 1.5), 8),
        "hair": make.texts(make.values(26, 1.3), 9),
        "sex": make.texts(make.values(5, 2), 15),
        "alive": make.texts(make.values(3, 1.5), 17),
        "appearances": [f"{count + 1}.0" for count in make.values(359, 1.3).tolist()],
        "first appearance": make.texts(month, 6),
        "year": [f"{1939 + each // 11}.0" for each in month.tolist()],
    }


def made_films(rows: int) -> Table:
    """Reviews of few films, each with the film's long description."""
    make = _Maker(rows)
    film = make.values(51, 0.4)
    number = make.rng.permutation(rows)
    return {
        "link": make.texts(film, 21),
        "review": make.texts(np.where(make.rng.random(rows) < 0.2, 0, number + 1), 110),
        "title": make.texts(film, 14),
        "info": make.texts(film, 333),
        "id": [str(50_000 + 3 * each) for each in number.tolist()],
    }


def made_sales(rows: int) -> Table:
    """Ten fields: products with a brand and a kind, users, days, marks and a number."""
    make = _Maker(rows)
    product = make.values(60_000, 1.1)
    quality = make.rng.random(60_000)[product]
    return {
        "product": make.texts(product, 32),
        "kind": make.texts(product * 7919 % 120, 9),
        "brand": make.texts(product * 31 % 4000, 11),
        "user": make.texts(make.values(200_000, 1.1), 10),
        "day": [str(1_100_000_000 + 86_400 * day) for day in make.values(4000, 0.1).tolist()],
        "overall": make.ratings(quality, 20, 0.2),
        "price": make.ratings(quality, 10, 0.2),
        "quality": make.ratings(quality, 5, 0.2),
        "delivery": make.ratings(quality, 5, 0.5),
        "number": [str(number) for number in make.rng.permutation(rows).tolist()],
    }


SOURCES = {
    "beer": Source(
        "beer.csv", 28_479, (("beer/name", "beer/beerId"), ("name", "item")), 70.7, 73, made_reviews
    ),
    "marvel": Source("marvel-wikia-data.csv", 16_376, (), 50.8, 52, made_characters),
    "movies_small": Source(
        "movies_small.csv",
        1_019,
        (("rotten_tomatoes_link", "movie_title", "movie_info"), ("link", "title", "info")),
        76.0,
        77,
        made_films,
    ),
}


def find_table(source: Source, folder: Path) -> Table | None:
    """The source's table from a folder or those in it, None if it is not there."""
    found = sorted(folder.rglob(source.file))
    return read_table(found[0]) if found else None
