# SPDX-License-Identifier: Apache-2.0
"""Which free block of the prefix cache leaves first.

next_use.py     which blocks waiting requests need, and how soon     (pure)
reuse.py        which blocks were used again, and their room         (pure)
set_aside.py    blocks that are kept, in the order in which they leave    (pure)
free_queue.py   takes the place of vLLM's queue of free blocks       (vLLM)
belady.py       the most hits any eviction could have                (pure)
"""
