# SPDX-License-Identifier: Apache-2.0
"""Attention that reads shared prefixes once: relay's operation on CPUs against vLLM's.

bench_op.py                one layer of decoding requests that share a prefix
bench_avx2.py              the same on CPUs without AVX-512
bench_shared_phase.py      the shared part alone
bench_threads.py           what more cores gain
bench_random_batches.py    whether relay is ever slower
bench_planning.py          finding out who shares what
bench_planning_gpu.py      the same for GPUs, step after step
bench_error.py             distances from results in float64
bench_low_parts.py         how often a weight in one bfloat16 number is enough
bench_end_to_end.py        decode steps of vLLM
bench_rollouts.py          many samples of one prompt, a real model
batches.py                 requests of a step, without keys and values
contenders.py              both operations on the same keys and values
plots.py                   speed-up by batch size
"""
