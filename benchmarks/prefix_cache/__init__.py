# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks stay.

bench_eviction.py     hits of each eviction policy
bench_predictor.py    predicted cached tokens against those of engines
"""
