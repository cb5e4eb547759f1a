# SPDX-License-Identifier: Apache-2.0
"""SQL that asks a model about tables.

bench_tables.py           hits of each order of rows and fields
bench_table_queries.py, bench_table_queries_learned.py    time of the whole job
bench_table_rivals.py, rivals/    what LOTUS, Daft and a loop send for the same queries
bench_semantic_operators.py, semantic/    what filters, joins, first rows and groups ask
data.py, database.py      the tables
queries.py                the questions asked of them
retrieval.py              the texts to find answers in
ggr.py                    the order of the papers
dummy_model.py            a model without weights
plots.py                  the plots of both
"""
