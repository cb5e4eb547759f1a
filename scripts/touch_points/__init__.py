# SPDX-License-Identifier: Apache-2.0
"""Finds every place at which vllm-relay depends on vLLM, in the sources of both.

scan.py          walks through ours
values.py        what an expression may stand for
inheritance.py   which members classes of ours have of vLLM's
findings.py      what a scan finds
hints.py         what the sources do not tell
recording.py     from what is found to the table; what of it does not fit together
"""
