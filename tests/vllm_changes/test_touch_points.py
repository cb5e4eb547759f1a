# SPDX-License-Identifier: Apache-2.0
"""What vllm-relay needs of vLLM stands in one table, and every vLLM it is tested with has it.

A failure names what of vLLM changed, how, and which file of ours to open. To take in a release:
``python scripts/record_touch_points.py --vllm FOLDER --record``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from touch_points.findings import Scan
from touch_points.recording import OURS, misfits, needed, release_of

from vllm_relay.vllm_changes.contract.python_sources import installed_vllm
from vllm_relay.vllm_changes.contract.shapes import ABSENT
from vllm_relay.vllm_changes.contract.table import TouchPoint, TouchPointTable


def vllm_folders() -> dict[str, Path]:
    """By release: the vLLM that Python imports, and those whose sources lie in the environment."""
    installed = installed_vllm()
    assert installed is not None
    overlays = [init.parent for init in Path(sys.prefix).glob("vllm-overlay/*/vllm/__init__.py")]
    return {release_of(folder): folder for folder in [*overlays, installed]}


FOLDERS = vllm_folders()


@functools.cache
def needs(release: str) -> Scan:
    return needed(FOLDERS[release], OURS)


@functools.cache
def table() -> TouchPointTable:
    return TouchPointTable.load()


@pytest.fixture(params=sorted(FOLDERS))
def release(request: pytest.FixtureRequest) -> str:
    return request.param


def told(lines: Iterable[object]) -> str:
    return "\n".join(["", *map(str, lines)])


def is_of_others(point: TouchPoint, release: str) -> bool:
    """Whether only other releases have it, so that nobody sees it in this one."""
    return point.shapes[release] == ABSENT and set(point.shapes.values()) != {ABSENT}


def test_each_touch_point_is_as_recorded(release: str) -> None:
    found = table().compare(FOLDERS[release], release)
    assert found.is_recorded, f"vLLM {release} is not in the table: record it"
    assert not found.differences, told(found.differences)


def test_nothing_is_used_that_is_not_in_the_table(release: str) -> None:
    def by_path(uses: Mapping[str, Mapping[str, object]]) -> set[str]:
        return {f"{path} in {file}: {how}" for path in uses for file, how in uses[path].items()}

    scan = needs(release)
    uses = {
        path: {file: ", ".join(sorted(how)) for file, how in files.items()}
        for path, files in scan.uses.items()
    }
    points = table().points
    for found, is_body in ((by_path(uses), False), (by_path(scan.bodies), True)):
        here = [each for each in points if each.is_body == is_body]
        known = by_path({each.path: each.needed_by for each in here})
        assert found - known == set(), f"not in the table: {told(sorted(found - known))}"
        others = [each for each in here if is_of_others(each, release)]
        unused = known - found - by_path({each.path: each.needed_by for each in others})
        assert unused == set(), f"nobody needs it: {told(sorted(unused))}"


def test_each_attribute_that_is_read_is_there(release: str) -> None:
    lines = [f"{path} in {', '.join(files)}" for path, files in needs(release).unknown.items()]
    assert not lines, told(lines)


def test_calls_fit_and_replacements_pass_on_what_they_do_not_know(release: str) -> None:
    lines = misfits(needs(release), FOLDERS[release], OURS)
    assert not lines, told(lines)


@pytest.mark.parametrize(
    ("path", "file", "how"),
    [
        # one of each kind, so that a scan that finds less is noticed
        ("vllm.v1.core.block_pool.FreeKVCacheBlockQueue", "vllm_changes/scheduler.py", "replaced"),
        (
            "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks",
            "long_context/scheduling/scheduler.py",
            "replaced",
        ),
        (
            "vllm.v1.core.sched.scheduler.Scheduler.schedule",
            "scheduler/vllm_scheduler.py",
            "overridden",
        ),
        ("vllm.v1.core.sched.scheduler.Scheduler.pins", "scheduler/vllm_scheduler.py", "added"),
        ("vllm.v1.engine.llm_engine.LLMEngine.__init__", "vllm_changes/engine_start.py", "wrapped"),
        (
            "vllm.v1.core.sched.request_queue.RequestQueue",
            "scheduler/vllm_queue.py",
            "subclassed",
        ),
        ("vllm.v1.request.Request.block_hashes", "scheduler/vllm_scheduler.py", "read"),
        (
            "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.single_type_managers",
            "long_context/scheduling/scheduler.py",
            "read",
        ),
        ("vllm.v1.core.block_pool.BlockPool.touch", "prefix_cache/pins/table.py", "called"),
        (
            "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
            "attention_backends/cuda/relay_choice.py",
            "named",
        ),
        (
            "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.popleft_n",
            "prefix_cache/eviction/free_queue.py",
            "overridden",
        ),
        ("vllm.plugins.load_general_plugins", "doctor.py", "imported"),
        (
            "vllm.v1.attention.backend.CommonAttentionMetadata.seq_lens",
            "attention_backends/cpu/relay.py",
            "read",
        ),
        (
            "vllm.v1.worker.gpu.input_batch.InputBatch.positions",
            "vllm_changes/worker/positions.py",
            "read",
        ),
    ],
)
def test_known_touch_points_are_found(path: str, file: str, how: str) -> None:
    scan = needs(sorted(FOLDERS)[-1])
    assert how in scan.uses.get(path, {}).get(f"vllm_relay/{file}", set()), scan.uses.get(path)
