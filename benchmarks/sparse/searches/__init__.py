# SPDX-License-Identifier: Apache-2.0
"""Searches for the keys that matter, and how they are compared.

contenders.py      what a search must offer, and vllm-relay's own indexes
rivals.py          searches that others have written
built.py           builds them, or takes what was built before
exact.py           the right answers, and how much of them was found
curves.py          recall against time
own_searches.py    groups of query heads, ranges, prefixes, errors of attention
mass_bounds.py     whether bounds on what was left out hold
plots.py           the plots
"""
