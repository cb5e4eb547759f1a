# SPDX-License-Identifier: Apache-2.0
"""What answers the prompts of a table: vLLM in this process, a server, or several.

base.py              the contract; what is thought before an answer
in_process.py, model_identity.py   vLLM's LLM in this process                       (vLLM)
server/              a server with OpenAI's API                                     (aiohttp)
replicas.py          several of these as one
ray_actors/          vLLM in several processes, on any machine                      (Ray)
opening.py, lazy.py  an engine from a name, opened when it is needed; jobs that can be stopped
addresses.py         addresses of servers, which are the same server, and their keys
step_times.py        what prompts take whose steps are known
"""
