# SPDX-License-Identifier: Apache-2.0
"""Files of arrays, verified by page (docs/context-files.md).

section_table.py     the format: fixed header, table of sections, their checks
section_writer.py    writes a file, whole or not at all
section_file.py, section_readers.py   opens one: mapped, or through a pool
buffer_pool.py       pages that are kept in memory, up to a limit
checksum.py          CRC-32C
damage.py            what is raised for what is not as it was written
aligned.py           arrays that begin at a cache line
"""
