# SPDX-License-Identifier: Apache-2.0
"""Many replicas: which prompts together, in which order, to which replica.

replica_index.py   which replica holds which KV blocks, predicted
told_caches.py     the same as replicas tell
event_stream.py    numbered messages of a publisher, without gaps
kv_events.py       vLLM's KV events, heard                                 (vLLM)
routing.py         where a request goes that arrives by itself
requests.py        what a router reads in a request of OpenAI's API
gateway.py         both, with replicas that come and go, for gateways
ray/               one endpoint over vLLMs that Ray Serve runs             (Ray, vLLM)
buckets.py         what a replica gets that has room, of prompts that stream in
simulate.py        replicas in virtual time, with vLLM's own schedulers    (vLLM)
rules.py           both for these, beside the usual rules                  (vLLM)
predict.py         `vllm-relay predict --replicas`                         (vLLM)
"""
