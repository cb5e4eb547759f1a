# SPDX-License-Identifier: Apache-2.0
"""From schemas and prompts to tokens and plans.

text_tokens.py       the words and tokens of a model
layout.py            the tokens and positions of a schema
render.py            a prompt held against its schema
plan.py              slots, positions and what is seen, of one prompt
block_hashes.py      names of blocks that do not depend on the rest of the prompt
schema_store.py      the schemas that a front end knows
"""
