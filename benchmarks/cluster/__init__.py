# SPDX-License-Identifier: Apache-2.0
"""Many replicas, most in virtual time.

bench_replicas.py        streams and arrivals, by router
bench_replica_seeds.py   8, 32 and 128 replicas, with several seeds
bench_bucketing.py       dynamic prefix bucketing, by buffer and bucket size
bench_real_replicas.py   two real ones, beside one engine and beside their simulation
bench_replica_index.py   what it costs to know which replica holds which blocks
bench_ray_data.py        what the driver of Ray Data takes for millions of rows
workloads.py             what is asked
rivals.py                other routers' rules
oracle.py                a rule that knows what no router does
"""
