# SPDX-License-Identifier: Apache-2.0
"""Long requests: a window on the device, the rest in host memory.

bench_long_context_quality.py     questions to long documents
bench_long_context_english.py     English and learned heads
bench_long_context_capacity.py    requests that are served at once
host_memory.py                    what a process takes against host_memory_gib: a table of the
                                  capacity benchmark
bench_long_context_decode.py      decode steps over a stored context
first_steps.py                    the longest steps when a long request begins: a table of it
bench_step_parts.py               where the time of such a step goes
bench_long_context_short.py       requests below the threshold
corpus_model.py                   a model that asks the queries of made heads
questions.py                      prompts behind a stored context, one layer
english_engine.py                 an engine that tells log-probabilities
english_engine_main.py            its process
alternating_engine.py             engines that take turns, step by step
alternating_engine_main.py        the process of one
"""
