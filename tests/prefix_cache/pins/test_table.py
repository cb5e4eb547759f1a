# SPDX-License-Identifier: Apache-2.0
"""Pins in vLLM's own KVCacheManager."""

from __future__ import annotations

import contextlib
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.prefix_cache.pins.pin_scheduler import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Scheduler,
    tokens,
)
from vllm_relay.commands.engine import result_of, run
from vllm_relay.commands.errors import CommandError
from vllm_relay.prefix_cache.pins.commands import COMMANDS
from vllm_relay.prefix_cache.pins.table import MAX_PINS


def test_pinned_prompt_survives_a_flood() -> None:
    scheduler = Scheduler()
    entry = scheduler.pin("a", tokens(18))
    assert entry == {
        "id": "a",
        "owner": "python",
        "expires_in_s": None,
        "tokens": 16,
        "blocks": 4,
        "bytes": 4 * BLOCK_BYTES,
        "resident": True,
        "problem": None,
    }
    scheduler.run(tokens(12, first=100))
    scheduler.flood()
    assert scheduler.run(tokens(18)) == 16
    assert scheduler.run(tokens(12, first=100)) == 0
    assert scheduler.num_free == 30 - 4


def test_unpinned_prompt_can_be_evicted() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16))
    scheduler.pins.unpin("a")
    assert scheduler.num_free == 30
    assert scheduler.pins.num_blocks == 0
    assert scheduler.run(tokens(18)) == 16
    scheduler.flood()
    assert scheduler.run(tokens(18)) == 0


def test_the_last_blocks_of_an_unpinned_prompt_leave_first() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16))
    scheduler.pins.unpin("a")
    others = [scheduler.request(tokens(n, first=100 * n)) for n in (40, 36, 32)]  # 27 of 30 blocks
    for other in others:
        scheduler.prefill(other)
    for other in others:
        scheduler.free(other)
    assert scheduler.run(tokens(18)) == 12


def test_pins_that_begin_alike_share_their_blocks() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(8))
    scheduler.pin("b", tokens(16))
    assert scheduler.pins.num_blocks == 4
    assert scheduler.pins.num_bytes == 4 * BLOCK_BYTES
    assert [entry["blocks"] for entry in scheduler.pins.entries()] == [2, 4]
    scheduler.pins.unpin("b")
    assert scheduler.pins.num_blocks == 2
    scheduler.flood()
    assert scheduler.run(tokens(16)) == 8
    scheduler.pins.unpin("a")
    assert scheduler.num_free == 30


def test_prompt_that_is_cached_already_is_pinned() -> None:
    scheduler = Scheduler()
    scheduler.run(tokens(16))
    scheduler.pin("a", tokens(16))  # its last block is computed again: vLLM needs logits
    scheduler.flood()
    assert scheduler.run(tokens(17)) == 16


@pytest.mark.parametrize("num_tokens", [4, 12, 15])
def test_request_that_is_aborted_before_it_has_computed_all_pins_nothing(num_tokens: int) -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16))
    request = scheduler.request(tokens(16), "a")
    scheduler.prefill(request, num_tokens)
    scheduler.free(request)
    assert not scheduler.entry("a")["resident"]
    assert scheduler.num_free == 30
    assert scheduler.run(tokens(16), "a") == num_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert scheduler.entry("a")["resident"]


def test_request_that_holds_no_blocks_pins_nothing() -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16))
    scheduler.free(scheduler.request(tokens(16), "a"))
    assert not scheduler.entry("a")["resident"]


@pytest.mark.parametrize(
    ("prompt", "kwargs"),
    [
        (tokens(16, first=1), {}),
        (tokens(8), {}),
        (tokens(16), {"cache_salt": "salt"}),
        (tokens(16), {"lora_request": LoRARequest("adapter", 1, "/adapter")}),
    ],
    ids=["other_tokens", "shorter", "salt", "lora"],
)
def test_requests_of_others_that_name_a_pin_do_not_make_it(prompt: Any, kwargs: Any) -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16))
    scheduler.run(prompt, "a", **kwargs)
    scheduler.run(prompt, "unknown", **kwargs)
    assert not scheduler.entry("a")["resident"]
    assert scheduler.num_free == 30


def test_reset_makes_pins_cold_until_any_request_computes_them() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16))
    assert scheduler.reset()
    assert scheduler.num_free == 30
    entry = scheduler.entry("a")
    assert (entry["resident"], entry["blocks"], entry["tokens"]) == (False, 0, 16)
    scheduler.run(tokens(16, first=50))
    assert not scheduler.entry("a")["resident"]
    assert scheduler.run(tokens(22)) == 0
    assert scheduler.entry("a")["resident"]
    scheduler.flood()
    assert scheduler.run(tokens(22)) == 16


def test_requests_that_run_during_a_reset_do_not_hold_what_it_forgets() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16))
    running = scheduler.request(tokens(22))
    scheduler.prefill(running)
    scheduler.running = [running]
    scheduler.pins.reset()
    scheduler.free(running)  # vLLM preempts it
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    assert scheduler.prefill(running) == 0
    scheduler.free(running)
    assert scheduler.entry("a")["resident"]


def test_unpinning_a_cold_pin() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16))
    scheduler.reset()
    scheduler.pins.unpin("a")
    scheduler.run(tokens(16))
    assert scheduler.num_free == 30


def test_declaring_again() -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16))
    scheduler.pin("a", tokens(16))
    assert scheduler.pins.declare("a", tokens(16))["resident"]
    for other in (tokens(12), tokens(17)):  # that has the same full blocks
        with pytest.raises(CommandError, match="another prompt") as caught:
            scheduler.pins.declare("a", other)
        assert caught.value.status == 409


@pytest.mark.parametrize("ends", ["unpinned", "in time"])
def test_a_pin_that_is_gone_before_it_is_computed(ends: str) -> None:
    """Who asks for one did not ask for an unknown pin."""
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16), ttl_s=1.0, declaration="first")
    if ends == "unpinned":
        scheduler.pins.unpin("a")
    else:
        scheduler.now_s += 2
    scheduler.run(tokens(16), "a")
    with pytest.raises(CommandError, match="before it was computed") as caught:
        scheduler.pins.settle("a", "first")
    assert caught.value.status == 409


def test_a_new_pin_that_is_not_computed_is_forgotten_by_who_declared_it() -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16), declaration="first")
    with pytest.raises(CommandError, match="ended without having computed all of it") as caught:
        scheduler.pins.settle("a", "second")
    assert caught.value.status == 409
    assert len(scheduler.pins.entries()) == 1
    with pytest.raises(CommandError, match="try again"):
        scheduler.pins.settle("a", "first")
    assert scheduler.pins.entries() == []
    scheduler.pins.declare("a", tokens(16), declaration="first")
    scheduler.pins.declare("a", tokens(16), declaration="second")  # relies on it
    with pytest.raises(CommandError, match="try again"):
        scheduler.pins.settle("a", "first")
    assert scheduler.pin("a", tokens(16))["resident"]
    assert scheduler.pins.settle("a", "second")["resident"]


def test_pins_take_their_share_of_the_cache_at_most() -> None:
    scheduler = Scheduler(max_pinned_fraction=0.3)  # 9 of 30 blocks
    scheduler.pin("a", tokens(20))
    scheduler.pins.declare("cold", tokens(16, first=50))
    with pytest.raises(CommandError) as caught:
        scheduler.pins.declare("b", tokens(8, first=100))
    assert caught.value.status == 507
    assert str(caught.value).startswith(
        "pin 'b' needs 2 KV blocks; of 30, 9 are pinned, and pins may take 9 "
        "(max_pinned_fraction=0.3): unpin another prompt"
    )
    scheduler.pins.declare("c", tokens(16))  # the beginning of a
    scheduler.pins.unpin("cold")
    scheduler.pins.declare("b", tokens(8, first=100))


def test_pins_of_the_same_blocks_are_counted_too() -> None:
    scheduler = Scheduler()
    for number in range(MAX_PINS):
        scheduler.pin(str(number), tokens(4))
    with pytest.raises(CommandError, match="1024 prompts are pinned, the most there can be"):
        scheduler.pins.declare("more", tokens(4))
    assert scheduler.pins.num_blocks == 1
    with pytest.raises(CommandError, match="pins: 0, 1, 2, .* and 1014 more"):
        scheduler.pins.unpin("more")


def test_a_pin_whose_time_is_up_leaves_before_the_next_step() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16), ttl_s=10)
    scheduler.pin("b", tokens(8), ttl_s=20)
    scheduler.now_s = 9.9
    scheduler.pins.expire()
    assert scheduler.pins.num_blocks == 4
    scheduler.now_s = 10.0
    scheduler.pins.expire()
    assert scheduler.pins.num_blocks == 2
    scheduler.pins.declare("b", tokens(8))  # for ever
    scheduler.now_s = 100.0
    assert [each["expires_in_s"] for each in scheduler.pins.entries()] == [None]


def test_only_its_owner_changes_a_pin() -> None:
    scheduler = Scheduler()
    scheduler.pin("a", tokens(16), owner="api-key-0", ttl_s=5)
    assert scheduler.pins.declare("a", tokens(16), owner="http")["expires_in_s"] == 5
    for change in (
        lambda: scheduler.pins.declare("a", tokens(16), owner="http", ttl_s=1),
        lambda: scheduler.pins.unpin("a", "http"),
    ):
        with pytest.raises(CommandError, match="belongs to api-key-0, not to http") as caught:
            change()
        assert caught.value.status == 403
    scheduler.pins.declare("a", tokens(16), owner="api-key-0", ttl_s=9)
    assert scheduler.entry("a")["expires_in_s"] == 9
    scheduler.pins.unpin("a")


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [
        (0, "a prompt of 0 tokens was given, .* expected at least 4 tokens"),
        (3, "a prompt of 3 tokens was given, .* expected at least 4 tokens"),
        (40, "a prompt of 40 tokens was given, expected fewer than max_model_len=40"),
    ],
)
def test_prompts_that_cannot_be_pinned(num_tokens: int, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        Scheduler().pins.declare("a", tokens(num_tokens))
    assert caught.value.status == 400


def test_unknown_pin() -> None:
    scheduler = Scheduler()
    scheduler.pins.declare("a", tokens(16))
    with pytest.raises(CommandError, match="there is no pin 'b'; pins: a") as caught:
        scheduler.pins.unpin("b")
    assert caught.value.status == 404


def test_the_longest_request_always_fits_beside_the_pins() -> None:
    scheduler = Scheduler(num_blocks=21)  # 20 usable ones, 10 for the longest request
    scheduler.pin("a", tokens(20))
    scheduler.pin("b", tokens(20, first=50))
    with pytest.raises(CommandError) as caught:
        scheduler.pins.declare("c", tokens(4, first=100))
    assert caught.value.status == 507
    assert str(caught.value).startswith(
        "pin 'c' needs 1 KV blocks; of 20, 10 are pinned, so 9 would be left, and the longest "
        "request (max_model_len=40) needs 10: unpin another prompt"
    )
    scheduler.pins.declare("d", tokens(8))  # the beginning of a
    scheduler.pins.unpin("b")
    scheduler.pins.declare("c", tokens(4, first=100))


def test_cold_pins_keep_their_room() -> None:
    scheduler = Scheduler(num_blocks=21)
    scheduler.pins.declare("a", tokens(36))
    with pytest.raises(CommandError, match="9 are pinned"):
        scheduler.pins.declare("b", tokens(8, first=50))


def test_pin_that_finds_no_room_when_it_is_computed_stays_cold() -> None:
    scheduler = Scheduler(num_blocks=21)
    scheduler.pins.declare("a", tokens(36))
    scheduler.max_model_len = 60
    scheduler.run(tokens(36), "a")
    entry = scheduler.entry("a")
    assert not entry["resident"]
    assert "the longest request (max_model_len=60) needs 15" in entry["problem"]
    assert scheduler.num_free == 20


def test_sliding_window_pins_only_what_a_hit_needs() -> None:
    scheduler = Scheduler(num_blocks=61, sliding_window=8)
    entry = scheduler.pin("a", tokens(24))
    assert entry["resident"]
    assert 6 + 2 <= entry["blocks"] <= 6 + 3
    scheduler.flood()
    assert scheduler.run(tokens(30)) == 24
    scheduler.pins.unpin("a")
    assert scheduler.num_free == 60


def test_commands_carry_results_and_errors() -> None:
    scheduler = Scheduler()
    arguments = {"pin_id": "a", "token_ids": tokens(16)}
    core = SimpleNamespace(scheduler=scheduler)
    answer = run(COMMANDS, core, "declare_pin", arguments)
    assert result_of(answer)["tokens"] == 16
    assert result_of(run(COMMANDS, core, "pins", {}))[0]["id"] == "a"
    with pytest.raises(CommandError) as caught:
        result_of(run(COMMANDS, core, "unpin", {"pin_id": "b"}))
    assert caught.value.status == 404
    with pytest.raises(CommandError, match="relay.scheduler true") as caught:
        result_of(run(COMMANDS, SimpleNamespace(scheduler=SimpleNamespace()), "pins", {}))
    assert caught.value.status == 501


@pytest.mark.parametrize("sliding_window", [None, 8])
@pytest.mark.parametrize("seed", range(5))
def test_any_course_of_events_leaves_every_block_free_or_pinned(
    seed: int, sliding_window: int | None
) -> None:
    random = Random(seed)
    scheduler = Scheduler(num_blocks=45, sliding_window=sliding_window)
    families = [[*tokens(8, first=100 * i), *tokens(24, first=1000 * i)] for i in range(1, 4)]

    def prompt() -> list[int]:
        return random.choice(families)[: random.randint(4, 32)] + tokens(random.randint(0, 7))

    for _ in range(300):
        pin_id = random.choice("abcdef")
        event = random.choice(["pin", "pin", "unpin", "run", "run", "abort", "reset", "flood"])
        if event in ("pin", "unpin"):
            with contextlib.suppress(CommandError):
                if event == "pin":
                    assert scheduler.pin(pin_id, prompt())["resident"]
                else:
                    scheduler.pins.unpin(pin_id)
        elif event == "run":
            scheduler.run(prompt())
        elif event == "abort":
            request = scheduler.request(prompt(), pin_id)
            scheduler.prefill(request, request.num_tokens - random.randint(0, 3))
            scheduler.free(request)
        elif event == "reset":
            assert scheduler.reset()
        else:
            scheduler.flood()
        assert scheduler.num_free == 44 - scheduler.pins.num_blocks
        longest = scheduler.request(tokens(MAX_MODEL_LEN - 1, first=9000))
        scheduler.prefill(longest)
        scheduler.free(longest)
    for entry in scheduler.pins.entries():
        scheduler.pins.unpin(entry["id"])
    assert scheduler.num_free == 44
