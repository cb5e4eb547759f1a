# SPDX-License-Identifier: Apache-2.0
"""SQL that asks a model about tables.

bench_tables.py           hits of each order of rows and fields
bench_table_queries.py    time of the whole job
data.py                   the tables
queries.py                the questions asked of them
retrieval.py              the texts to find answers in
ggr.py                    the order of the papers
dummy_model.py            a model without weights
plots.py                  the plots of both
"""
