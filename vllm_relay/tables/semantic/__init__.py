# SPDX-License-Identifier: Apache-2.0
"""Questions that are not about one row: about groups, pairs and whole tables. See
docs/semantic-operators.md.

Patel et al., "Semantic Operators: A Declarative Model for Rich, AI-based Data Processing", 2024.

    record_lists.py, tree.py   one answer for each list of records, however long
    session.py           the jobs of one operator
    calibration.py       thresholds of scores, from a labelled sample                   (numpy)
    scores.py            how likely a model takes a statement for true
    embeddings.py, near_duplicates.py   vectors of texts; rows that are nearly equal
    aggregate.py, filter.py, join.py, top_k.py   the operators                     (DuckDB)
"""
