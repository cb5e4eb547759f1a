# SPDX-License-Identifier: Apache-2.0
"""Keys, values and queries of attention heads: made from a seed, or recorded from a model.

corpus.py             made heads of every kind
shape.py              what heads are asked for
random_matrices.py    what they are made of
rope.py               heads with rotary embedding
recorded.py           heads of a model's forward passes
sets.py               heads with their variants, for a benchmark to run on
"""
