# SPDX-License-Identifier: Apache-2.0
"""Several vLLMs that Ray runs, on one machine or many.

replica.py    what an actor does: an engine, asked in pieces
engine.py     the driver's side of an actor: an `Engine`                             (Ray)
starting.py   actors where Ray has room, as one engine                               (Ray)
"""
