# SPDX-License-Identifier: Apache-2.0
"""What front ends add to vLLM's: the routes under /relay, the field `relay` of requests, and
`ModularLLM`.

    access.py            who may use the routes
    requests.py          bodies of requests, and their errors
    pins.py, contexts.py, schemas.py, page.py   routes, as endpoint plug-ins of vLLM
    fresh_metrics.py     metrics that are true when they are read
    modular_requests.py, modular_bodies.py   the field `relay` of completions and chat completions
    modular_llm.py       prompts with modules for `LLM`
"""
