# SPDX-License-Identifier: Apache-2.0
"""The name under which `vllm_relay.modules` was published first; it stays."""

from vllm_relay.modules import *  # noqa: F403
from vllm_relay.modules import __all__ as __all__
