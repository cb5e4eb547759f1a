# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's own tests is run, what is not and why, and which may fail with relay and why."""

from __future__ import annotations

from collections.abc import Mapping

FILES = (
    "tests/v1/core/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "tests/v1/core/prefix_cache/test_partial_prefix_cache_hits.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_mamba_align_chunk_split.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_swa_inflight_window_free.py",
    "tests/v1/core/test_worker_slot_overflow.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
    "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_connector_lifecycle.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/kv_connector/unit/test_multi_connector.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_scheduler_kv_connector_override.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
)
"""Tests of schedulers, and of the prefix cache through them, that need no weights."""

FIXTURES = ("tests.v1.kv_connector.unit.offloading_connector.conftest",)
"""Modules with fixtures of these tests: pytest reads no conftest.py of vLLM's."""

MODELS = {
    "facebook/opt-125m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
    "facebook/opt-350m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
    },
}
"""Configurations in the place of models that the tests name: schedulers read no more of them."""

_IMAGES = "asks for the model llava, which needs torchvision"
_IMAGES_TESTS = (
    "test_eagle3_mm_encoder_cache_with_shift",
    "test_ec_connector_allocate_encoder_tokens_with_external_load",
    "test_ec_connector_cache_hit_external_load",
    "test_ec_connector_cache_miss_computes_locally",
    "test_ec_connector_defers_running_request_for_async_reload",
    "test_ec_connector_ensure_cache_available_defers_request",
    "test_ec_connector_schedule_multiple_requests",
    "test_ec_connector_text_only_request",
    "test_ec_connector_unable_to_allocate",
    "test_ec_connector_update_connector_output_called",
    "test_ec_connector_with_partial_cache_hit_multi_round",
    "test_encoder_cache_accepts_matching_embed_count",
    "test_encoder_cache_embed_count_mismatch_restores_prior_hit_state",
    "test_encoder_cache_recomputed_when_evicted_during_preemption",
    "test_encoder_cache_rejects_mismatched_embed_count",
    "test_encoder_cache_rejects_mismatched_embed_count_within_request",
    "test_encoder_cache_retained_across_preemption_and_resume",
    "test_encoder_only_prompt_longer_than_budget_is_chunked",
    "test_free_encoder_inputs_notifies_the_ec_connector",
    "test_free_encoder_inputs_respects_unconfirmed_placeholders",
    "test_free_encoder_inputs_unchanged_without_spec_decode",
    "test_no_mm_input_chunking",
    "test_no_mm_input_chunking_for_same_step_duplicate",
    "test_priority_scheduling_ec_connector_preemption_and_resumption",
    "test_same_step_duplicate_encoder_input_stays_cached",
    "test_schedule_multimodal_requests",
    "test_schedule_partial_requests",
    "test_unavailable_encoder_input_fails_the_request_as_retryable",
)
_IMAGES_TESTS_OF = {
    "0.32": ("test_free_encoder_inputs_defers_for_eagle_lookahead",),
    "0.33": (
        "test_cpu_encoder_input_updates_preserve_shm_handles",
        "test_cpu_encoder_input_updates_restore_after_kv_load_failure",
        "test_cpu_encoder_input_updates_resume_and_abort",
        "test_cpu_encoder_input_updates_wait_for_completed_prefill",
        "test_ec_connector_waits_for_embeddings_in_prefix_replay",
        "test_no_mm_input_chunking_at_item_boundary",
        "test_waiting_encoder_stall_does_not_starve_later_requests",
        "test_waiting_encoder_stall_is_counted_as_deferred",
        "test_waiting_encoder_stall_kv_holder_keeps_drain_priority",
    ),
}

_OTHER_TESTS_OF = {
    "0.33": {
        "test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": (
            "needs model runner V2, which is not chosen on CPUs"
        )
    }
}


def left_out(release: str) -> dict[str, str]:
    """Test functions that do not pass with vLLM's own schedulers either, each with its reason.

    Args:
        release: as "0.32".
    """
    reasons = dict.fromkeys((*_IMAGES_TESTS, *_IMAGES_TESTS_OF.get(release, ())), _IMAGES)
    reasons |= _OTHER_TESTS_OF.get(release, {})
    left = {f"tests/v1/core/test_scheduler.py::{name}": why for name, why in reasons.items()}
    multi = "tests/v1/kv_connector/unit/test_multi_connector.py"
    left[f"{multi}::test_multi_example_connector_consistency"] = "needs the weights of a model"
    return left


_PREFILL = "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py"
DIFFERENT: Mapping[str, str] = {
    f"{_PREFILL}::test_no_spurious_prefix_caching": (
        "while a KV connector loads the prompt of one request, another with that prompt is held, "
        "for max_hold_s at most; vLLM computes it a second time"
    ),
}
"""Tests that pass with vLLM's schedulers and rightly fail with relay's, each with its reason."""


def contradictions(
    stock: Mapping[str, str], relay: Mapping[str, str], different: Mapping[str, str]
) -> list[str]:
    """What is not as it should be; nothing if all is.

    Args:
        stock: by test, "passed", "skipped" or "failed" with vLLM's schedulers.
        relay: the same with relay's.
        different: see `DIFFERENT`.
    """
    found = [
        f"{test}: was run with {'relay' if test in relay else 'vLLM'}'s schedulers only"
        for test in sorted(stock.keys() ^ relay.keys())
    ]
    found += [
        f"{test}: fails with vLLM's own schedulers: name it in left_out(), with its reason"
        for test, outcome in stock.items()
        if outcome == "failed"
    ]
    for test in sorted(stock.keys() & relay.keys()):
        if stock[test] == "failed" or stock[test] == relay[test]:
            continue
        if relay[test] != "failed":
            found.append(
                f"{test}: {stock[test]} with vLLM's schedulers, {relay[test]} with relay's"
            )
        elif test not in different:
            found.append(
                f"{test}: fails with relay's schedulers: mend it, or name it in DIFFERENT with its "
                "reason"
            )
    found += [
        f"{test}: does not fail with relay's schedulers: take it out of DIFFERENT"
        for test in sorted(different)
        if relay.get(test) != "failed"
    ]
    return found
