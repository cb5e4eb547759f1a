# SPDX-License-Identifier: Apache-2.0
"""Mistakes that somebody could make, each of which the tests of the default run must find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """
    Attributes:
        path: of the source, from the root.
        old, new: what is replaced, which occurs exactly once, and by what.
        tests: files that must fail, from `tests/`.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(path: str, tests: str, *changes: tuple[str, str]) -> list[Mutation]:
    return [Mutation(path, old, new, tuple(tests.split())) for old, new in changes]


_BACKENDS = "vllm_relay/attention_backends"
_CACHE, _SCHEDULER = "vllm_relay/prefix_cache", "vllm_relay/scheduler"
_MODULES, _SPARSE = "vllm_relay/modules", "vllm_relay/sparse"
_ORDERING = "vllm_relay/tables/ordering"

MUTATIONS = [
    # kernels
    *_of(
        "csrc/attention/write_kv_cache.cpp",
        "attention_backends/test_ops.py",
        ("if (slot < 0) continue;", "if (slot < 1) continue;"),
        ("offset % kStep;\n  for (int group", "offset % kGroup;\n  for (int group"),
    ),
    *_of(
        "csrc/storage/crc32c_portable.cpp",
        "sparse/test_checksum.py",
        ("kTables[7][low & 0xff]", "kTables[6][low & 0xff]"),
    ),
    *_of(
        "csrc/storage/page_checksums.cpp",
        "sparse/test_section_faults.py sparse/test_section_file.py sparse/test_row_guards.py",
        ("if (found != checksums[i])", "if (i > begin && found != checksums[i])"),
    ),
    # which requests share what, and what it costs
    *_of(
        f"{_BACKENDS}/forest.py",
        "attention_backends/test_forest.py",
        ("ids[requests, limits] = -1 - requests", "ids[requests, limits] = -1"),
        ("begin if begin > length else length, end", "begin, end"),
        ("node[BEGIN_TOKENS] = ancestors[-1][1]", "node[BEGIN_TOKENS] = node[BEGIN_TOKENS]"),
        ('np.argsort(null_heads, kind="stable")', 'np.argsort(-null_heads, kind="stable")'),
    ),
    *_of(
        f"{_BACKENDS}/plan.py",
        "attention_backends/test_plan.py attention_backends/test_ops.py",
        (">= apart_token_ns * tokens\n", ">= 2 * apart_token_ns * tokens\n"),
        ("seq_lens[order] - lens + 1, lens)", "seq_lens[order] - lens, lens)"),
        ("np.minimum(spans[:, LAST], cuts[row_block + 1])", "spans[:, LAST]"),
        (
            "part * segments[block] // parts[block]\n    items[:, 2]",
            "part * segments[block] // parts[block] + (part > 0)\n    items[:, 2]",
        ),
    ),
    *_of(
        f"{_BACKENDS}/cost.py",
        "attention_backends/test_plan.py",
        (
            "return self.token_ns(rows) * tokens + self.start_ns(rows)",
            "return self.token_ns(rows) * tokens",
        ),
    ),
    *_of(
        f"{_BACKENDS}/gpu_plan.py",
        "attention_backends/test_gpu_plan.py",
        ("-(-(segment_end - begin) // tile)", "(segment_end - begin) // tile"),
        (
            "visible[own_tokens] = seq_lens[request] - length + 1 +",
            "visible[own_tokens] = seq_lens[request] - length +",
        ),
        ("end = end // config.tile_tokens * config.tile_tokens\n", "pass\n"),
    ),
    # who runs next
    *_of(
        f"{_SCHEDULER}/order.py",
        "scheduler/test_order.py",
        ("node.oldest = min(node.oldest, position)", "node.oldest = max(node.oldest, position)"),
        ("self._current = path[0] if path else None", "self._current = None"),
        (
            "if self.is_resident(node.last_block):\n                node.hold_until_s = None",
            "if self.is_resident(node.first_block):\n                node.hold_until_s = None",
        ),
        (
            "middle = (low + high + 1) // 2\n        if chain[middle - 1] ==",
            "middle = (low + high + 1) // 2\n        if chain[middle - 1] or node.chain[0] ==",
        ),
    ),
    *_of(
        f"{_SCHEDULER}/fairness.py",
        "scheduler/test_fairness.py",
        ("len(self._ahead) >= self.max_overtakes", "len(self._ahead) > self.max_overtakes"),
        ("overtaken_s >= self.max_hold_s and", "overtaken_s >= 2 * self.max_hold_s and"),
    ),
    *_of(
        f"{_SCHEDULER}/request_queue.py",
        "scheduler/test_request_queue.py",
        ("if self._chosen is not None or len(each):", "if self._chosen is not None:"),
        ("for request in self._by_arrival(waiting):", "for request in waiting:"),
        ("return request.priority if self._by_priority else 0", "return 0"),
    ),
    # what stays in the prefix cache
    *_of(
        f"{_CACHE}/pins/table.py",
        "prefix_cache/pins/test_table.py",
        ("self._pool.free_blocks(reversed(pin.blocks))", "self._pool.free_blocks(pin.blocks)"),
        ("if num_cached_tokens < num_tokens:", "if num_cached_tokens < num_tokens - 32:"),
        ("            and request.cache_salt is None\n", ""),
        ("num_tokens >= max_model_len:", "num_tokens > max_model_len:"),
        ("if pin.prompt != prompt:", "if pin.prefix != digest_of(token_ids[: pin.num_slots]):"),
        ("each.expires_s <= now_s]", "each.expires_s < now_s]"),
        ("if pin.declaration == declaration:", "if pin.declaration is not None:"),
    ),
    *_of(
        f"{_CACHE}/pins/room.py",
        "prefix_cache/pins/test_table.py",
        ("+ num_new_blocks > num_allowed:", "+ num_new_blocks > num_usable:"),
    ),
    *_of(
        f"{_CACHE}/pins/pin.py",
        "prefix_cache/pins/test_table.py",
        ("if self.owner == owner:", "if self.owner != CONFIGURATION:"),
    ),
    *_of(
        "vllm_relay/serving/access.py",
        "prefix_cache/pins/test_http.py",
        ('if request.method not in ("GET", "HEAD") and routes', "if routes"),
        ('if scheme.lower() != "bearer" or not any(is_key):', "if not given:"),
        ('if routes_of(app) != "off":', "if app:"),
    ),
    *_of(
        f"{_CACHE}/policies.py",
        "prefix_cache/test_policies.py",
        (
            "return (1, -position, -node.depth_tokens, freed_at)",
            "return (1, position, -node.depth_tokens, freed_at)",
        ),
        ("self._age = max(self._age, node.value)", "pass"),
        ("return None if parent.free_children else parent", "return parent"),
    ),
    *_of(
        f"{_CACHE}/free_queue.py",
        "prefix_cache/test_free_queue.py prefix_cache/test_policies.py",
        (
            "        self._tree.note_chain(keys, is_use=is_use)\n",
            "        self._tree.note_chain(keys, is_use=True)\n",
        ),
    ),
    # prompt modules
    *_of(
        f"{_MODULES}/plan.py",
        "modules/test_render.py",
        (
            "for begin, end in (*ranges, (num_visible, self.num_slots(segment))):",
            "for begin, end in (*ranges, (num_visible, segment.num_tokens)):",
        ),
        ("position != positions[offset - 1] + 1", "position < positions[offset - 1] + 1"),
    ),
    *_of(
        f"{_MODULES}/block_hashes.py",
        "modules/test_block_hashes.py",
        ("self._hash((parent, tokens, positions))", "self._hash((parent, tokens))"),
    ),
    # stored contexts and their search
    *_of(
        f"{_SPARSE}/section_table.py",
        "sparse/test_section_table.py",
        ("if end > fixed.file_bytes:", "if end > 2 * fixed.file_bytes:"),
        (
            "        if begin < end:\n            raise IndexDamagedError",
            "        if begin < 0:\n            raise IndexDamagedError",
        ),
    ),
    *_of(
        f"{_SPARSE}/context_fingerprint.py",
        "sparse/test_context_fingerprint.py",
        ("hashlib.blake2b(link + block,", "hashlib.blake2b(block,"),
    ),
    *_of(
        f"{_SPARSE}/planner.py",
        "sparse/test_planner.py",
        (
            "of_kind = [each for each in looked_at if each.kind == kind]",
            "of_kind = [each for each in looked_at if each.kind == kind][:1]",
        ),
        (
            "chosen = min(by_kind.values(), key=_preference)",
            "chosen = max(by_kind.values(), key=_preference)",
        ),
    ),
    *_of(
        f"{_SPARSE}/error_bound.py",
        "sparse/test_error_bound.py",
        ("float(np.quantile(errors, min(quantile, 1.0)))", "float(np.quantile(errors, 0.99))"),
    ),
    *_of(
        "vllm_relay/long_context/window.py",
        "long_context/test_window.py",
        (
            "+ max_in_flight_tokens) // size) + 1",
            "+ max_in_flight_tokens) // size)",
        ),
    ),
    # tables
    *_of(
        f"{_ORDERING}/sequences.py",
        "tables/ordering/test_sequences.py",
        ("depth - (~equal[ended]).astype(np.int64)", "depth"),
    ),
    *_of(
        f"{_ORDERING}/cached_tokens.py",
        "tables/ordering/test_cached_tokens.py",
        ("np.maximum(num_tokens - 1, 0) // size)\n    if", "num_tokens // size)\n    if"),
    ),
    *_of(
        f"{_ORDERING}/fixed_order.py",
        "tables/ordering/test_orders.py",
        ("/ max(c.num_values, 1) if rows", "* max(c.num_values, 1) if rows"),
    ),
    *_of(
        "vllm_relay/tables/sql/pushdown.py",
        "tables/sql/test_rows_asked.py tables/sql/test_against_oracle.py",
        ("        if _filters_commute(select, joins, index):\n", "        if True:\n"),
    ),
]
