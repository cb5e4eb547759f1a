# SPDX-License-Identifier: Apache-2.0
"""Changes of a statement's text after which fewer rows are asked about, each right on its own.

filters.py          conditions that ask stay above the joins; IN (SELECT ...) on the key of a group
                    goes below the grouping
lazy.py             answers of subqueries are looked up where they are used
volatile.py         what differs each time is evaluated once
error_columns.py    columns of errors
"""
