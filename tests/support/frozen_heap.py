# SPDX-License-Identifier: Apache-2.0
"""Imported last by the process that others fork from: what it has imported is no garbage, and
looking for some there takes as long as the rest of an engine's start."""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # else libraries report what is left at the end as leaks
