# SPDX-License-Identifier: Apache-2.0
"""How engines keep to the plans of prompts.

requests.py          engines and requests that are refused
waiting.py           which requests wait for which modules                         (pure)
admission.py         requests wait for their modules
worker.py            positions of tokens, and what they see
"""
