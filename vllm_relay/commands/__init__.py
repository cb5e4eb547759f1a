# SPDX-License-Identifier: Apache-2.0
"""What front ends ask the engine core: one error, one way there and back, and the prompts that are
asked for.

    errors.py            the error of commands, with its HTTP status
    owners.py            who may change what somebody has made
    engine.py            commands in the engine core, and how front ends reach them
    prompts.py           the tokens with which all prompts begin that continue a text
    compute.py           the request for one token that computes a prompt
    at_start.py          what engines compute when they start
"""
