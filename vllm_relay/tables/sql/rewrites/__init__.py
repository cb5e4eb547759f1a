# SPDX-License-Identifier: Apache-2.0
"""Changes of a statement's text after which fewer rows are asked about, each right on its own.

anchors.py          conditions that ask stay above the joins
group_filters.py    IN (SELECT ...) on the key of a group goes below the grouping
lazy.py             answers of subqueries are looked up where they are used
volatile.py         what differs each time is evaluated once
choices.py          for estimates: all calls among which answers choose are looked at
error_columns.py    columns of errors
"""
