# SPDX-License-Identifier: Apache-2.0
"""Semantic operators against asking about everything.

cases.py       tables whose answers are known
engine.py      the model that gives them, and what it was asked
baselines.py   what is done without the operators
"""
