# SPDX-License-Identifier: Apache-2.0
"""Many replicas, most in virtual time.

bench_replicas.py    streams and arrivals, by router
bench_replica_index.py    what knowing their caches costs
workloads.py         what is asked
rivals.py            other routers' rules
"""
