# SPDX-License-Identifier: Apache-2.0
"""Fields that are images: each stands in prompts as a reference until a server gets it.

fields.py    which fields of a question are images, and what their values are         (pure)
store.py     references, and what they stand for                                      (pure)
content.py   a message with references as parts of a chat message                     (pure)
columns.py   columns of values as columns of references                              (Arrow)
"""
