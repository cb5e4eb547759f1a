# SPDX-License-Identifier: Apache-2.0
"""Pure modules stay pure: importing them loads neither torch, transformers nor vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.forked_programs import lines_of_each

HEAVY = ("torch", "transformers", "vllm")
MODULES = [
    "vllm_relay",
    "vllm_relay.cli",
    "vllm_relay.doctor",
    "vllm_relay.plugin",
    "vllm_relay.attention_backends.block_order",
    "vllm_relay.attention_backends.forest",
    "vllm_relay.attention_backends.plan",
    "vllm_relay.attention_backends.cost",
    "vllm_relay.attention_backends.cuda.config",
    "vllm_relay.attention_backends.cuda.plans.plan",
    "vllm_relay.attention_backends.step_rows",
    "vllm_relay.cluster.gateway",
    "vllm_relay.cluster.routing",
    "vllm_relay.cluster.told_caches",
    "vllm_relay.commands.engine",
    "vllm_relay.long_context.scheduling.host_memory",
    "vllm_relay.config.long_contexts",
    "vllm_relay.long_context.orders",
    "vllm_relay.long_context.window",
    "vllm_relay.page.feed",
    "vllm_relay.page.source",
    "vllm_relay.page.viewers",
    "vllm_relay.prefix_cache.eviction.belady",
    "vllm_relay.modules",  # imports schemas, layouts, prompts and their plans
    "vllm_relay.modules.engine.waiting",
    "vllm_relay.modules.prompt.block_hashes",
    "vllm_relay.modules.prompt.layout",
    "vllm_relay.prefix_cache.modules",  # its first name
    "vllm_relay.prefix_cache.eviction.next_use",
    "vllm_relay.prefix_cache.eviction.reuse",
    "vllm_relay.prefix_cache.eviction.set_aside",
    "vllm_relay.prefix_cache.predict.load",
    "vllm_relay.scheduler.fairness",
    "vllm_relay.scheduler.order",
    "vllm_relay.sparse",
    "vllm_relay.sparse.contexts.contexts_command",
    "vllm_relay.sparse.plan.index_choice",
    "vllm_relay.tables",
    "vllm_relay.tables.engines.ray_actors.starting",
    "vllm_relay.tables.engines.server.engine",
    "vllm_relay.tables.jobs.asking",
    "vllm_relay.vllm_changes.contract.table",
    "vllm_relay.wiring",
]

IMPORT = """
import {module}
print([name for name in {heavy} if name in sys.modules])
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The heavy packages that importing a module loads, or its traceback."""
    programs = [IMPORT.format(module=module, heavy=HEAVY) for module in MODULES]
    often = "import msgspec, numpy, pydantic, typer"  # what most of them import
    return dict(zip(MODULES, lines_of_each(often, programs), strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_neither_torch_nor_vllm(module: str, loaded: dict[str, list[str]]) -> None:
    assert loaded[module] == ["[]"]


def test_the_context_database_registers_its_attention_when_it_is_asked_for() -> None:
    program = (
        "import sys; from vllm_relay.sparse import DB;"
        "from transformers import AttentionInterface, AttentionMaskInterface;"
        "print('relay_sparse' in AttentionInterface(), "
        "'relay_sparse' in AttentionMaskInterface(), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "False"]


def test_prompt_modules_are_found_under_the_name_they_had_first() -> None:
    import vllm_relay.modules
    from vllm_relay.prefix_cache.modules import ModularLLM, parse_schema

    assert ModularLLM is vllm_relay.modules.ModularLLM
    assert parse_schema is vllm_relay.modules.parse_schema
