# SPDX-License-Identifier: Apache-2.0
"""Many replicas in virtual time.

bench_replicas.py    streams and arrivals, by router
workloads.py         what is asked
rivals.py            other routers' rules
"""
