# SPDX-License-Identifier: Apache-2.0
"""The live page of a server, in `static`: the prefix forest in its KV cache, and what runs on it.

record.py       what is in the KV blocks of an engine: where their prefixes lead, their tokens and
                uses; lives in the engine core
recording.py    beginning to record, where a scheduler is to    (vLLM)
feed.py         what of it those who watch have not been told, and what stands beside it
commands.py     what front ends ask of both
blocks.py       blocks on their way to a front end
forest.py       the forest as front ends were told: runs of blocks without branches, and changes
leaving.py      in which order they leave the cache
source.py       an engine that is watched: its forest, its numbers, texts, what is evicted
viewers.py      one who watches for all viewers, and what a viewer has not read yet
"""
