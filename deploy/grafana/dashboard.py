# SPDX-License-Identifier: Apache-2.0
"""Writes relay.json, the Grafana dashboard: run it after a change and commit both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("relay.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANELS_A_ROW = 3
WIDTH, HEIGHT = 24 // PANELS_A_ROW, 8

OURS = '{model_name=~"$model_name", engine=~"$engine", instance=~"$instance"}'
RAYS = '{ReplicaId=~".+"}'
WHERE = "{{instance}} {{engine}}"

Query = tuple[str, str]
"""A PromQL expression and what its lines are called."""


def rate(name: str, by: str = "instance, engine") -> str:
    """Of a counter, a second, with the series of one engine put together."""
    return f"sum by ({by}) (rate({name}{OURS}[$__rate_interval]))"


def gauge(name: str) -> str:
    return f"sum by (instance, engine) ({name}{OURS})"


def panel(title: str, text: str, unit: str, *queries: Query) -> dict[str, Any]:
    """A time series; "percentunit" goes from 0 to 1."""
    defaults: dict[str, Any] = {"unit": unit, "custom": {"fillOpacity": 10}, "min": 0}
    if unit == "percentunit":
        defaults["max"] = 1
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expression,
             "legendFormat": legend}
            for number, (expression, legend) in enumerate(queries)
        ],
    }  # fmt: skip


READ = "relay:kv_tokens_read_total"
ATTENDED = "relay:kv_tokens_logical_total"
TTFT = "vllm:time_to_first_token_seconds_bucket"
ITL = "vllm:inter_token_latency_seconds_bucket"

ROWS: dict[str, list[dict[str, Any]]] = {
    "Sharing": [
        panel(
            "KV reading saved",
            "Of the KV tokens that requests attend to, those that were not read once more. 0: "
            "nothing is shared, or sharing does not pay.",
            "percentunit", (f"1 - {rate(READ)} / {rate(ATTENDED)}", WHERE),
        ),
        panel(
            "KV tokens attended and read",
            "What attention would read without sharing, and what it reads.",
            "short", (rate(ATTENDED), f"attended {WHERE}"), (rate(READ), f"read {WHERE}"),
        ),
        panel(
            "Requests in a group",
            "Of the requests in a step, those that read a prefix together with others.",
            "percentunit",
            (f"{rate('relay:request_steps_shared_total')} / {rate('relay:request_steps_total')}",
             WHERE),
        ),
        panel(
            "Groups and depth of the last step",
            "Groups that shared a prefix, and levels of nested ones.",
            "short", (gauge("relay:groups"), f"groups {WHERE}"),
            (gauge("relay:forest_depth"), f"depth {WHERE}"),
        ),
        panel(
            "Requests a step",
            "How many requests a step computes.",
            "short", (f"{rate('relay:request_steps_total')} / {rate('relay:steps_total')}", WHERE),
        ),
        panel(
            "Planning a step",
            "Time to find out who shares what.",
            "s", (f"{rate('relay:planning_seconds_total')} / {rate('relay:steps_total')}", WHERE),
        ),
    ],
    "Requests": [
        panel(
            "Time to first token",
            "Of requests that began to be answered, by vLLM's histogram.",
            "s",
            *((f"histogram_quantile({q}, {rate(TTFT, 'le')})", f"p{q * 100:g}")
              for q in (0.5, 0.99)),
        ),
        panel(
            "Time between tokens",
            "Of all requests, by vLLM's histogram.",
            "s",
            *((f"histogram_quantile({q}, {rate(ITL, 'le')})", f"p{q * 100:g}")
              for q in (0.5, 0.99)),
        ),
        panel(
            "Tokens a second",
            "Generated ones, and those of prompts.",
            "short", (rate("vllm:generation_tokens_total"), f"generated {WHERE}"),
            (rate("vllm:prompt_tokens_total"), f"prompts {WHERE}"),
        ),
    ],
    "Scheduler": [
        panel(
            "Waiting and running",
            "Requests in the engine.",
            "short", (gauge("vllm:num_requests_running"), f"running {WHERE}"),
            (gauge("vllm:num_requests_waiting"), f"waiting {WHERE}"),
        ),
        panel(
            "Why requests wait",
            "held: until another has computed their prefix; leading: those others; blocked: they "
            "lack a grammar, an adapter's place or a module; overtaken: a later one ran before.",
            "short",
            *((gauge(f"relay:{name}_requests"), f"{name} {WHERE}")
              for name in ("held", "leading", "blocked", "overtaken")),
        ),
        panel(
            "Overtaking",
            "Requests a second that ran while an older one of their priority waited.",
            "short", (rate("relay:overtakes_total"), WHERE),
        ),
        panel(
            "Time in the scheduler",
            "Of a step; 1 / steps a second is what a step takes in all.",
            "s",
            (f"{rate('relay:scheduling_seconds_total')} / {rate('relay:scheduling_steps_total')}",
             WHERE),
        ),
        panel(
            "Preemptions",
            "Requests a second that had to give their KV blocks back.",
            "short", (rate("vllm:num_preemptions_total"), WHERE),
        ),
    ],
    "Prefix cache": [
        panel(
            "Hit rate",
            "Of the tokens of admitted requests, those found in the cache.",
            "percentunit",
            (f"{rate('relay:prefix_hit_tokens_total')} / {rate('relay:prefix_query_tokens_total')}",
             WHERE),
        ),
        panel(
            "Tokens saved a second",
            "What did not have to be computed, requests resumed after a preemption included.",
            "short", (rate("relay:tokens_saved_total"), WHERE),
        ),
        panel(
            "Hit rate by tenant",
            "By adapter and cache salt.",
            "percentunit",
            (f"{rate('relay:tenant_hit_tokens_total', 'tenant')} / "
             f"{rate('relay:tenant_query_tokens_total', 'tenant')}", "{{tenant}}"),
        ),
        panel(
            "Evicted blocks a second",
            "needed: a waiting request would have used them, so that the cache is too small.",
            "short", (rate("relay:evicted_blocks_total", "reason"), "{{reason}}"),
        ),
        panel(
            "KV cache in use",
            "Of vLLM's KV cache, by running requests and pinned prompts.",
            "percentunit", (gauge("vllm:kv_cache_usage_perc"), WHERE),
        ),
        panel(
            "Pinned prompts",
            "What they hold in one worker.",
            "bytes", (gauge("relay:pinned_bytes"), WHERE),
        ),
        panel(
            "Pinned blocks",
            "KV blocks that pinned prompts hold.",
            "short", (gauge("relay:pinned_blocks"), WHERE),
        ),
    ],
    "Long contexts": [
        panel(
            "Host memory",
            "Reserved for keys, values and indexes, and what may be.",
            "bytes", (gauge("relay:host_kv_bytes"), f"reserved {WHERE}"),
            (gauge("relay:host_kv_limit_bytes"), f"limit {WHERE}"),
        ),
        panel(
            "Device memory",
            "KV cache that requests and pins hold on the device.",
            "bytes", (gauge("relay:device_kv_bytes"), WHERE),
        ),
        panel(
            "Stored contexts",
            "And those whose indexes are being built, or wait for it.",
            "short", (gauge("relay:contexts"), f"contexts {WHERE}"),
            (gauge("relay:index_builds_queued"), f"builds {WHERE}"),
        ),
        panel(
            "Files of contexts",
            "Bytes on disk.",
            "bytes", (gauge("relay:context_file_bytes"), WHERE),
        ),
        panel(
            "Tokens read of those searched",
            "Of the tokens in host memory, those that at least one query head got.",
            "percentunit",
            (f"{rate('relay:host_retrieved_tokens_total')} / "
             f"{rate('relay:host_searched_tokens_total')}", WHERE),
        ),
        panel(
            "Bytes read a search",
            "Keys, values and indexes.",
            "bytes",
            (f"{rate('relay:host_read_bytes_total')} / {rate('relay:host_searches_total')}", WHERE),
        ),
        panel(
            "Where attention takes its time",
            "Seconds a second over host memory and on the device.",
            "s", (rate("relay:host_seconds_total"), f"host {WHERE}"),
            (rate("relay:device_seconds_total"), f"device {WHERE}"),
        ),
        panel(
            "Dropped mass",
            "With max_dropped_mass or max_error, the largest bound of the last step.",
            "percentunit", (gauge("relay:host_dropped_mass"), WHERE),
        ),
        panel(
            "Kept over preemptions",
            "Tokens a second that preempted requests did not compute again.",
            "short", (rate("relay:preempted_kept_tokens_total"), WHERE),
        ),
    ],
    "Modules": [
        panel(
            "Module hits a second",
            "Prompt modules that admitted requests found computed, and their tokens.",
            "short", (rate("relay:module_hits_total"), f"modules {WHERE}"),
            (rate("relay:module_hit_tokens_total"), f"tokens {WHERE}"),
        ),
        panel(
            "Modules computed a second",
            "Where this stays high, modules are evicted before they are used again.",
            "short", (rate("relay:module_encodings_total"), WHERE),
        ),
        panel(
            "KV cache filled with modules",
            "Bytes a second in one worker.",
            "Bps", (rate("relay:module_encoded_bytes_total"), WHERE),
        ),
    ],
    "Replicas (Ray Serve)": [
        panel(
            "Load",
            "Tokens that a replica has yet to compute.",
            "short", ("sum by (to_replica) (ray_relay_load_tokens)", "{{to_replica}}"),
        ),
        panel(
            "Prompt tokens expected in a cache",
            "Of the tokens routed to a replica.",
            "percentunit",
            ("sum by (to_replica) "
             "(rate(ray_relay_expected_cached_tokens_total[$__rate_interval])) / sum by "
             "(to_replica) (rate(ray_relay_routed_prompt_tokens_total[$__rate_interval]))",
             "{{to_replica}}"),
        ),
        panel(
            "Hit rate of a replica",
            "By vLLM's counters.",
            "percentunit",
            (f"sum by (ReplicaId) (rate(ray_vllm_prefix_cache_hits_total{RAYS}[$__rate_interval])) "
             "/ sum by (ReplicaId) "
             f"(rate(ray_vllm_prefix_cache_queries_total{RAYS}[$__rate_interval]))",
             "{{ReplicaId}}"),
        ),
    ],
}  # fmt: skip


def variable(name: str, label: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE,
        "query": {"query": f"label_values(vllm:num_requests_running, {name})", "refId": name},
        "includeAll": True, "multi": True, "allValue": ".*", "refresh": 2, "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )  # fmt: skip
        top += 1
        for number, each in enumerate(row):
            line, column = divmod(number, PANELS_A_ROW)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({**each, "gridPos": place})
        top += -(-len(row) // PANELS_A_ROW) * HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource",
                  "query": "prometheus"}  # fmt: skip
    names = {"model_name": "model", "instance": "server", "engine": "engine"}
    return {
        "title": "vllm-relay",
        "uid": "vllm-relay",
        "description": "Shared prefixes: what is shared, cached, held and read.",
        "tags": ["vllm"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [datasource, *(variable(*each) for each in names.items())]},
        "panels": panels,
    }


def main() -> None:
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
