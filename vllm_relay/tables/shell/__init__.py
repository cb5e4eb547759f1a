# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay sql`."""
