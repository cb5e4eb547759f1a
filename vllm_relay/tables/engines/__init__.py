# SPDX-License-Identifier: Apache-2.0
"""What answers the prompts of a table: vLLM in this process, or a server.

base.py              the contract
in_process.py, started.py   vLLM's LLM in this process                             (vLLM)
server.py, server_client.py, server_http.py, server_messages.py, server_models.py,
server_retries.py, server_thread.py, server_tokenizer.py
                     any server with OpenAI's API                                  (aiohttp)
lazy.py, opening.py  an engine from a name, opened when it is needed
"""

from vllm_relay.tables.engines.base import Completion, Engine, EngineError, Prompt

__all__ = ["Completion", "Engine", "EngineError", "Prompt"]
