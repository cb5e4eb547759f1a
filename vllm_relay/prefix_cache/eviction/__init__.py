# SPDX-License-Identifier: Apache-2.0
"""Which free block of the prefix cache leaves first.

next_use.py     which blocks waiting requests need, and how soon     (pure)
policies.py     how long a policy keeps a block                      (pure)
set_aside.py    the blocks that it keeps, in the order in which they leave    (pure)
free_queue.py   takes the place of vLLM's queue of free blocks       (vLLM)
belady.py       the most hits any eviction could have                (pure)
"""
