# SPDX-License-Identifier: Apache-2.0
"""What front ends add to vLLM's: the routes under /relay, the field `relay` of requests, and
`ModularLLM`."""
