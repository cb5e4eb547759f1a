# SPDX-License-Identifier: Apache-2.0
"""An order of fields for each row.

groups.py            rows with an equal beginning, split by one more field
field_sets.py        which field comes next, given which came before
refinement.py        rows of the same beginning that go on with different fields
per_row_order.py     the order
"""
