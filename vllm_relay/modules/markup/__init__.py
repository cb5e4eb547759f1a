# SPDX-License-Identifier: Apache-2.0
"""The Prompt Markup Language: what is written in schemas and prompts.

schema.py            what a schema consists of
xml_tree.py          XML with the place of everything, and which white space is text
pml.py               schemas and prompts as they are written
"""
