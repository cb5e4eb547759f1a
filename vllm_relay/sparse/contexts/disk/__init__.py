# SPDX-License-Identifier: Apache-2.0
"""Stored contexts in a folder, found again by the next process.

context_file.py      one context in a file (docs/context-files.md)
context_folder.py    the files in a folder
disk_context.py, disk_context_store.py   contexts in them
"""
