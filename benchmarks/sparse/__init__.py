# SPDX-License-Identifier: Apache-2.0
"""Key indexes and sparse attention, measured on heads that models have or could have.

bench_index_build.py     what building a graph costs
bench_key_index.py       recall against time, beside other vector searches
bench_model_heads.py     heads of real forward passes
bench_planner.py         the planner's choice against the best of all
bench_real_heads.py      a real model that attends sparsely, and what rivals do at the same bytes
bench_sparse_layer.py    a layer over a stored context
bench_storage.py         what verifying stored contexts costs
bench_open_context.py    from a context on disk to its first attention
best_way.py, index_timing.py   the best of all ways to attend a head, timed in turn
exact_answers.py, answer_errors.py   what exact answers hold, and how far off attention is with them
paper_rules.py           the rules of the AlayaDB paper
heads/                   the heads: made, or recorded from a model
real_heads/              a real model that attends by a selection of keys
searches/                the searches that are compared, and how
"""
