# SPDX-License-Identifier: Apache-2.0
"""What vllm-relay needs of vLLM, and whether a vLLM has it.

    touch_points.json    every class, function and field of vLLM that is imported, extended,
                         replaced, called or read; which files need it; its shape in each release
    table.py             the table held against a vLLM
    python_sources.py    what is defined where, without importing it
    shapes.py            what of a definition matters to who uses it

``scripts/record_touch_points.py`` finds the touch points and records a release.
"""
