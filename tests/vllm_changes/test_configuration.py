# SPDX-License-Identifier: Apache-2.0
"""How configurations are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_relay.plugin import register
from vllm_relay.vllm_changes.platform import RefusedError

MESSAGE = (
    "additional_config.relay.min_shared_tokens: given -3, expected a number from 0, or leave it "
    "out for 0"
)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    register()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # put back at the end
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    relay = {"min_shared_tokens": -3}
    return {
        "model": str(tmp_path),
        "skip_tokenizer_init": True,
        "additional_config": {"relay": relay},
    }


@pytest.mark.parametrize("usage", [UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER])
def test_a_refusal_is_the_message_alone(
    arguments: dict[str, Any], usage: UsageContext, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RefusedError) as refused:
        EngineArgs(**arguments).create_engine_config(usage)
    assert str(refused.value) == MESSAGE
    assert refused.value.__context__ is None
    capsys.readouterr()
    sys.excepthook(RefusedError, refused.value, refused.tb)
    printed = capsys.readouterr().err
    if usage == UsageContext.OPENAI_API_SERVER:
        assert printed == f"vllm-relay: {MESSAGE}\n"
    else:  # who wrote the call finds its line
        assert printed.startswith("Traceback") and printed.endswith(f"RefusedError: {MESSAGE}\n")


def test_other_errors_of_a_server_are_printed_as_they_were(
    arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RefusedError):
        EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    sys.excepthook(KeyError, KeyError("name"), None)
    assert capsys.readouterr().err.endswith("KeyError: 'name'\n")


def test_what_vllm_refuses_is_told_by_vllm(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens"):
        EngineArgs(**arguments, max_num_batched_tokens=1, max_num_seqs=2).create_engine_config()
