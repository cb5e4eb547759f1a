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
_PAGE, _ORDERING = "vllm_relay/page", "vllm_relay/tables/ordering"

MUTATIONS = [
    # kernels
    *_of(
        "csrc/attention/write_kv_cache.cpp",
        "attention_backends/test_ops.py",
        ("if (slot < 0) continue;", "if (slot < 1) continue;"),
        ("offset % kStep;\n  for (int group", "offset % kGroup;\n  for (int group"),
    ),
    *_of(
        "csrc/attention/scalar.h",
        "attention_backends/test_fp8_cache.py",
        ("0x7ffffu + ((magnitude >> 20) & 1u)", "0x80000u"),
    ),
    *_of(
        "csrc/storage/crc32c_portable.cpp",
        "sparse/files/test_checksum.py",
        ("kTables[7][low & 0xff]", "kTables[6][low & 0xff]"),
    ),
    *_of(
        "csrc/storage/page_checksums.cpp",
        "sparse/files/test_section_faults.py sparse/files/test_section_file.py "
        "sparse/files/test_row_guards.py",
        ("if (found != checksums[i])", "if (i > begin && found != checksums[i])"),
    ),
    # which requests share what, and what it costs
    *_of(
        f"{_BACKENDS}/forest.py",
        "attention_backends/test_forest.py",
        ("np.minimum(common, np.minimum(ends[1:], ends[:-1]))", "common"),
        ("np.append(forest.nodes[:, END_TOKENS], 0)", "np.append(forest.nodes[:, END_TOKENS], 16)"),
        ("_last_before(forest.levels + 1,", "_last_before(forest.levels + 2,"),
        ('np.argsort(null_heads, kind="stable")', 'np.argsort(-null_heads, kind="stable")'),
    ),
    *_of(
        f"{_BACKENDS}/groups.py",
        "attention_backends/test_groups.py",
        ("= kept_ns < stays_ns", "= 2 * kept_ns < stays_ns"),
        ("(apart_ns - together_ns) * ends", "(apart_ns - together_ns) * ends / 4"),
    ),
    *_of(
        f"{_BACKENDS}/plan.py",
        "attention_backends/test_plan.py attention_backends/test_ops.py",
        ("seq_lens[order] - lens + 1, lens)", "seq_lens[order] - lens, lens)"),
        ("np.minimum(spans[:, LAST], cuts[row_block + 1])", "spans[:, LAST]"),
    ),
    *_of(
        "csrc/attention/plan_work.cpp",
        "attention_backends/test_divided_segments.py",
        ("first = part * groups / parts, last", "first = part * groups / parts + (part > 0), last"),
        ("part * rows / parts, (part + 1)", "part * rows / parts + (part > 0), (part + 1)"),
    ),
    *_of(
        "csrc/attention/driver.h",
        "attention_backends/test_divided_segments.py",
        ("if (merge.has_divisions) repair(", "if (false) repair("),
    ),
    *_of(
        "csrc/attention/amx_products.h",
        "attention_backends/test_ops.py",
        ("keep(last / 2, 0xffff)", "keep(last / 2, -1)"),
    ),
    *_of(
        "csrc/attention/amx_kernel.h",
        "attention_backends/test_growing_scores.py",
        ("token + kLanes < visible_end", "token + kLanes + 1 < visible_end"),
        ("multiply_values(token);\n", "\n"),
    ),
    *_of(
        "csrc/attention/amx_pipeline.h",
        "attention_backends/test_ops.py",
        ("    use_low_rows(kTileRows);\n", ""),
    ),
    *_of(
        "csrc/attention/refold.h",
        "attention_backends/test_growing_scores.py",
        ("clear_row(states, row, dim_groups);", ""),
    ),
    *_of(
        "csrc/attention/row_state.h",
        "attention_backends/test_growing_scores.py",
        ("std::floor(exponent / 2)", "std::ceil(exponent / 2)"),
    ),
    *_of(
        "csrc/attention/vector_kernel.h",
        "attention_backends/test_growing_scores.py",
        ("store16(sums, sums_before);\n        raise", "raise"),
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
        f"{_BACKENDS}/cuda/flash/kernels.py",
        "attention_backends/test_relay_nodes.py",
        ("other = LSE_UNIT * tl.load(", "other = tl.load("),
        ("reference = LSE_UNIT * tl.load(", "reference = tl.load("),
    ),
    *_of(
        f"{_BACKENDS}/cuda/flash/relay_flashinfer.py",
        "attention_backends/test_relay_nodes.py attention_backends/test_relay_choice.py",
        (
            "impl.sliding_window == (-1, -1) and not impl.logits_soft_cap",
            "not impl.logits_soft_cap",
        ),
        ("require_uniform=True", "require_uniform=False"),
        ("num_actual_tokens=tails.num_prefill_tokens", "num_actual_tokens=tails.num_actual_tokens"),
        ("causal=False", "causal=True"),
        ("layer._q_scale_float * layer._k_scale_float if", "layer._k_scale_float if"),
        ("layer._v_scale_float if is_fp8 else 1.0", "1.0"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/flash/node_plans.py",
        "attention_backends/test_relay_nodes.py",
        ("min(num_sharing, len(batch.request_ids))", "len(batch.request_ids)"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/relay_choice.py",
        "attention_backends/test_relay_choice.py",
        ("capability.major == 10", "capability.major >= 10"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/plans/plan.py",
        "attention_backends/test_gpu_plan.py",
        ("= within - lens[request] + 1", "= within - lens[request]"),
        ("- slots_of.cumsum() + slots_of)[node]", ")[node]"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/plans/spans.py",
        "attention_backends/test_gpu_plan.py",
        ("given_end // unit * unit)", "given_end)"),
        ("(end - begin <= segment)", "(end > begin)"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/plans/spans.py",
        "attention_backends/test_gpu_planner.py",
        ("seq_lens[0][order] - lens + 1", "seq_lens[1][order] - lens + 1"),
        ("(tile, segment, section, NOWHERE)", "(tile, NOWHERE)"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/plans/plan_cuts.py",
        "attention_backends/test_gpu_plan.py",
        ("(end == span_end) & spans.final[span]", "spans.final[span]"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/plans/plan_cuts.py",
        "attention_backends/test_gpu_balance.py",
        ("share_ns / PARTS", "share_ns / PARTS[:7]"),
    ),
    *_of(
        f"{_BACKENDS}/cuda/step_batch.py",
        "attention_backends/test_gpu_planner.py",
        ("num_memberships > max_states", "num_memberships > max_states + 1"),
    ),
    *_of(
        f"{_BACKENDS}/block_order.py",
        "attention_backends/test_block_order.py",
        ("shareable_tokens // block_size,", "2**30 + 0 * shareable_tokens,"),
        ("if has_nulls:", "if False:"),
    ),
    *_of(
        "csrc/attention/block_order.cpp",
        "attention_backends/test_block_order.py",
        ("next->common == before;", "false;"),
        ("std::min(next->common, place->common)", "next->common"),
        ("std::max(open.back().end, length)", "open.back().end"),
        ("std::max(sharing[i].common, next)", "0"),
        ("first == place ? limit : place->common", "place->common"),
        ("(first + 1)->common, limit)", "(first + 1)->common, 0)"),
    ),
    # who runs next
    *_of(
        f"{_SCHEDULER}/order.py",
        "scheduler/test_order.py scheduler/test_lanes.py",
        ("self._current = path[0]", "self._current = self._root"),
        ("node.turn = node.size  # its turn begins", "node.turn = 10**9"),
        ("is_turn_over = node.turn <= 0", "is_turn_over = node.turn <= -(10**9)"),
        ("rank = (not node.resident, self._places", "rank = (node.resident, self._places"),
        ("upper.arrivals = lower.arrivals.copy()", "upper.arrivals = []"),
        ("if chosen != request:", "if True:"),
        ("if not seen and is_late(oldest):", "if False:"),
        ("held.add(child)\n                    break", "held.add(child)"),
    ),
    *_of(
        f"{_CACHE}/chains.py",
        "scheduler/test_order.py",
        ("left[depth] != right[depth])", "left[depth] != right[depth] and depth + 1 < end)"),
    ),
    *_of(
        f"{_SCHEDULER}/warm_up.py",
        "scheduler/test_lanes.py scheduler/test_loadable.py",
        ("if common <= lead.first_block or", "if"),
        ("if common <= lead.num_loaded or not", "if not"),
        ("or not self.is_loadable(chain[common - 1])", "or True"),
        ("if not self.is_resident(chain[common - 1]):", "if True:"),
    ),
    *_of(
        f"{_SCHEDULER}/warm_up.py",
        "scheduler/test_loadable.py",
        ("if len(self._found) >= _LIMIT:", "if False:"),
        ("self._unasked[request] = chain  # another time", "pass"),
        ("self._names[name] -= 1", "self._names[name] = 0"),
    ),
    *_of(
        f"{_SCHEDULER}/fairness.py",
        "scheduler/test_fairness.py scheduler/test_lanes.py",
        ("older + self.max_overtakes", "older + self.max_overtakes + 1"),
        ("now_s - wait.turn_s >= self.max_hold_s", "now_s - wait.turn_s >= 2 * self.max_hold_s"),
        (
            "wait = self._aside.pop(request, None)",
            "self._aside.pop(request, None)\n        wait = None",
        ),
    ),
    *_of(
        f"{_SCHEDULER}/lanes.py",
        "scheduler/test_lanes.py",
        ("self._next.add(request, number)", "self._next.add(request, -number)"),
        (
            "if found is None or self._is_within(found)",
            "if found is None or True or self._is_within(found)",
        ),
    ),
    *_of(
        f"{_SCHEDULER}/tenants.py",
        "scheduler/test_tenants.py",
        ("self.round_tokens) - tokens", "self.round_tokens) + tokens"),
        ("if lanes is not None and not lanes and not", "if lanes is not None and not"),
    ),
    *_of(
        f"{_SCHEDULER}/vllm_scheduler.py",
        "scheduler/test_vllm_scheduler.py",
        ("return all(self.cached_block", "return any(self.cached_block"),
    ),
    *_of(
        f"{_SCHEDULER}/vllm_queue.py",
        "scheduler/test_vllm_queue.py",
        ("elif now_s - self._held_since_s", "elif False and now_s - self._held_since_s"),
        ("return request.priority if self.by_priority else 0", "return 0"),
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
        f"{_CACHE}/pins/pin.py",
        "prefix_cache/pins/test_table.py",
        ("+ num_new_blocks > num_allowed:", "+ num_new_blocks > num_usable:"),
    ),
    *_of(
        "vllm_relay/commands/owners.py",
        "prefix_cache/pins/test_table.py serving/test_schemas.py",
        ("if owner == asking:", "if owner != CONFIGURATION:"),
    ),
    *_of(
        f"{_MODULES}/prompt/schema_store.py",
        "serving/test_schemas.py",
        ("            self._check_owner(schema.name, owner)\n", ""),
    ),
    *_of(
        "vllm_relay/serving/access.py",
        "prefix_cache/pins/test_http.py",
        ('if request.method not in ("GET", "HEAD") and routes', "if routes"),
        ('if scheme.lower() != "bearer" or not any(is_key):', "if not given:"),
        ('if routes_of(app) != "off":', "if app:"),
    ),
    *_of(
        f"{_CACHE}/eviction/reuse.py",
        "prefix_cache/eviction/test_policies.py",
        ("(blocks if is_reused else -blocks)", "-blocks"),
        ("self._reused.add(self._used.known(keys))", "self._reused.add(keys)"),
    ),
    *_of(
        f"{_CACHE}/eviction/next_use.py",
        "prefix_cache/eviction/test_next_use.py",
        ("_Run(run.chain, end, run.waiting_ranks())", "_Run(run.chain, end, run.ranks[:1])"),
    ),
    *_of(
        f"{_CACHE}/eviction/set_aside.py",
        "prefix_cache/eviction/test_policies.py",
        ("if self._rank(kept):", "if kept:"),
        ("for key in filter(self._by_key.__contains__, keys):", "for key in ():"),
    ),
    *_of(
        f"{_CACHE}/eviction/free_queue.py",
        "prefix_cache/eviction/test_walk.py",
        ("if self._freed_at[block.block_id] != freed_at:", "if False:"),
    ),
    *_of(
        f"{_CACHE}/eviction/free_queue.py",
        "prefix_cache/eviction/test_free_queue.py",
        ("while is_needed or len(kept_blocks) < most", "while len(kept_blocks) < most"),
        ("while is_needed or len(kept_blocks) < most", "while True"),
        ("                or (key in needed) != is_needed\n", ""),
        ("                or self._freed_at[block.block_id] > before\n", ""),
    ),
    *_of(
        f"{_CACHE}/eviction/free_queue.py",
        "prefix_cache/eviction/test_policies.py",
        ("return (1, *(-each for each in rank)", "return (1, *rank"),
        ("max(0, self._reused.num_free_blocks - self._reuse.room_blocks)", "0"),
    ),
    # prompt modules
    *_of(
        f"{_MODULES}/prompt/plan.py",
        "modules/prompt/test_render.py",
        (
            "for begin, end in (*ranges, (num_visible, self.num_slots(segment))):",
            "for begin, end in (*ranges, (num_visible, segment.num_tokens)):",
        ),
    ),
    *_of(
        f"{_MODULES}/prompt/render.py",
        "modules/prompt/test_render.py",
        ("if last and not changed and last.position", "if last and last.position"),
    ),
    *_of(
        f"{_MODULES}/engine/waiting.py",
        "modules/engine/test_waiting.py",
        ("self._look_at(key)\n        return able", "return able"),
        ("        self._computed.discard(key)\n", ""),
    ),
    *_of(
        f"{_MODULES}/prompt/block_hashes.py",
        "modules/prompt/test_block_hashes.py",
        ("self._hash((parent, tokens, positions))", "self._hash((parent, tokens))"),
    ),
    # stored contexts and their search
    *_of(
        f"{_SPARSE}/files/section_table.py",
        "sparse/files/test_section_table.py",
        ("if end > fixed.file_bytes:", "if end > 2 * fixed.file_bytes:"),
        (
            "        if begin < end:\n            raise IndexDamagedError",
            "        if begin < 0:\n            raise IndexDamagedError",
        ),
    ),
    *_of(
        f"{_SPARSE}/contexts/context_fingerprint.py",
        "sparse/contexts/test_context_fingerprint.py",
        ("hashlib.blake2b(link + block,", "hashlib.blake2b(block,"),
    ),
    *_of(
        f"{_SPARSE}/plan/index_choice.py",
        "sparse/plan/test_index_choice.py",
        ("return min((way for way in ways if not way.problem)", "return min((way for way in ways)"),
        ("(1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)", "(1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)"),
    ),
    *_of(
        f"{_SPARSE}/plan/head_sample.py",
        "sparse/plan/test_error_bound.py",
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
    *_of(
        "vllm_relay/long_context/scheduling/host_memory.py",
        "long_context/scheduling/test_host_memory.py",
        ("readers = (request_id, *self._requests)", "readers = (*self._requests,)"),
        ("num_bytes in held if each not in requests)", "num_bytes in held)"),
    ),
    *_of(
        "vllm_relay/long_context/scheduling/kept_contexts.py",
        "long_context/scheduling/test_contexts_in_memory.py",
        (
            "self._memory.bytes_for(num_tokens - num_reused), self",
            "self._memory.bytes_for(num_tokens), self",
        ),
    ),
    *_of(
        "vllm_relay/long_context/scheduling/scheduler.py",
        "long_context/scheduling/test_contexts_in_memory.py",
        ("num_tokens - (0 if reused is None else reused.num_tokens)", "num_tokens"),
        ("if self._has_folder and not is_alone:", "if False:"),
        (
            "if request_id in self._preempted:\n                self._drop",
            "if False:\n                self._drop",
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
        f"{_ORDERING}/table_order.py",
        "tables/ordering/test_orders.py",
        ("/ max(c.num_values, 1) if rows", "* max(c.num_values, 1) if rows"),
    ),
    *_of(
        "vllm_relay/tables/sql/replay/limits.py",
        "tables/sql/test_rows_asked.py tables/sql/test_against_oracle.py",
        ("                if certain == wanted:\n", "                if certain:\n"),
    ),
    # the live page
    *_of(
        f"{_PAGE}/forest.py",
        "page/test_forest.py",
        ("takewhile(self.is_pinned, node.blocks)", "filter(self.is_pinned, node.blocks)"),
        ("self._cut_off.setdefault(block.key, set()).add(child)", "pass"),
        ("if behind.blocks[0].module != node.blocks[-1].module:", "if False:"),
        ("self._changed |= dict.fromkeys([*before, *self._busy])", "pass"),
    ),
    *_of(
        f"{_PAGE}/leaving.py",
        "page/test_forest.py page/test_record.py",
        ("forest.is_pinned(node.blocks[-1])", "forest.is_pinned(node.blocks[0])"),
        ("if not remaining[parent.id] and _is_free", "if _is_free"),
    ),
    *_of(
        f"{_PAGE}/record.py",
        "page/test_record.py",
        ("int(is_new), self._clock()", "1, self._clock()"),
        ("if not request.cache_salt:  #", "if True:  #"),
        ("uses.pop(entry[0], (0, 0.0)) if uses else (0, 0.0)", "(0, 0.0)"),
    ),
    *_of(
        f"{_PAGE}/feed.py",
        "page/test_record.py",
        ("is_full = known is None or known.number != number", "is_full = known is None"),
        ("if not all(is_plain for *_, is_plain, _ in entries):", "if False:"),
    ),
    *_of(
        f"{_PAGE}/viewers.py",
        "page/test_routes.py",
        ("if len(self.unread) >= MAX_UNREAD_EVENTS:", "if False:"),
        ('{**node, "text": None}', "node"),
    ),
    *_of(
        "vllm_relay/cluster/ray/router.py",
        "cluster/ray/test_forwarding.py",
        ("routing_context.should_backoff = True", "routing_context.should_backoff = False"),
    ),
]
