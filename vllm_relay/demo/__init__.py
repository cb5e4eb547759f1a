# SPDX-License-Identifier: Apache-2.0
"""The demo: one workload answered by stock vLLM and by vLLM with relay, side by side.

options.py           what all demos are told
engine.py, engine_main.py, engine_process.py   engines, each in a process of its own
recall_model.py, tokenizer.py, words.py   a model with known answers
requests.py, workload.py, run.py, report.py, answers.py   many questions under some system prompts
smollm2/             a real instruct model from the package index, and chats in English
long_contexts/, modules/, tables/   the other workloads
"""
