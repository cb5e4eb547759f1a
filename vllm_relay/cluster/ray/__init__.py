# SPDX-License-Identifier: Apache-2.0
"""One OpenAI-compatible endpoint over many vLLMs: Ray Serve starts them, a `Gateway` routes.

tunnel.py         an HTTP request to an application in another process
asked.py          a request as the router and the endpoint know it             (Ray)
router.py         Ray Serve's choice of a replica                              (Ray)
page.py           the live page of all replicas together                       (Ray)
endpoint.py       what clients reach: requests are sent on, answers come back  (Ray)
actor_options.py  what vLLM needs inside an actor
replica.py        vLLM's own server as a replica                               (Ray, vLLM)
serve.py          `serve run vllm_relay.cluster.ray.serve:app`                 (Ray, vLLM)
"""
