# SPDX-License-Identifier: Apache-2.0
"""Long values that rows share as prompt modules: computed once, wherever they stand in a prompt.

prompts.py           the prompts of a table's rows, in their order, as the engine gets them
layout.py            which values become modules, and at which positions
"""
