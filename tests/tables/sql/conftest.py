# SPDX-License-Identifier: Apache-2.0
import duckdb
import pytest

TABLES = """
CREATE TABLE movies AS SELECT * FROM (VALUES
    (1, 'Alpha', 'a dog', 'Fresh', 7.5, [1, 2]), (2, 'Beta', 'a cat', 'Rotten', 3.0, [3]),
    (3, 'Alpha', 'a dog', 'Fresh', NULL, []), (4, NULL, 'a fish', NULL, 5.0, NULL),
    (5, 'Gamma', NULL, 'Fresh', 9.0, [4]), (6, 'Delta', 'a cat', 'Rotten', 3.0, [5]),
    (7, 'Eta', 'a bird', 'Fresh', 1.0, [6, 7]), (8, 'Zeta', 'a cat', 'Mixed', 2.0, [8])
) movie(id, title, info, type, score, numbers);
CREATE TABLE reviews AS SELECT * FROM (VALUES
    (1, 'good', 10), (1, 'bad', 20), (2, 'good', 30), (5, NULL, 40),
    (9, 'lost', 50), (7, 'fine', 60)
) review(id, body, stars);
CREATE TABLE "odd names" AS SELECT id AS "the id", title AS "select", info AS "ÜnïCode" FROM movies;
CREATE TABLE numbers AS SELECT range AS n FROM range(1000);
"""


@pytest.fixture
def connection():
    connection = duckdb.connect()
    connection.execute(TABLES)
    yield connection
    connection.close()
