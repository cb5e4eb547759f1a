# SPDX-License-Identifier: Apache-2.0
"""What answers the prompts of a table: vLLM in this process, or a server.

base.py              the contract
in_process.py, started.py, model_identity.py   vLLM's LLM in this process           (vLLM)
server.py            any server with OpenAI's API; server_client.py answers its prompts: when
                     (_admission, _retries), how (_dialect, _messages, _http, _keys), of which
                     model (_models, _tokenizer), in a loop of its own (_thread)      (aiohttp)
reasoning.py         what is thought before an answer
lazy.py, opening.py  an engine from a name, opened when it is needed
"""

from vllm_relay.tables.engines.base import Completion, Engine, EngineError, Prompt

__all__ = ["Completion", "Engine", "EngineError", "Prompt"]
