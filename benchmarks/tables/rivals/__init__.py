# SPDX-License-Identifier: Apache-2.0
"""What LOTUS, Daft and a loop send for the same queries.

prefix_cache_server.py    the server that they all ask
oracle.py                 what it answers
rivals_main.py            their queries
"""
