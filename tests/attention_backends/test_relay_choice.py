# SPDX-License-Identifier: Apache-2.0
"""Which class serves a layer on CUDA."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import vllm.v1.attention.backends
from vllm.platforms.interface import DeviceCapability

from tests.attention_backends import flashinfer_twin
from tests.attention_backends.node_workers import relay_flashinfer
from tests.test_plugin import selector_config
from vllm_relay.attention_backends.cuda import relay_choice, relay_stock
from vllm_relay.limits import RelayUnsupportedError


@pytest.mark.parametrize("prefix", ["Relay", "RelaySparse"])
def test_layers_on_cuda_get_the_class_whose_prompts_can_be_served(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    broken: set[str] = set()
    monkeypatch.setattr(
        relay_choice,
        "_reasons_against",
        lambda path, *args, **keywords: ["broken"] * (path in broken),
    )
    name = {"Relay": "RELAY", "RelaySparse": "RELAY_SPARSE"}[prefix]
    for stock in ("Flash", "Triton"):
        path = relay_choice.path_for_layer(name, selector_config(), None)
        module, _, cls = path.rpartition(".")
        assert cls == f"{prefix}{stock}Backend"
        backend = getattr(importlib.import_module(module), cls)
        assert backend.get_name() == name
        broken.add(f"{backend.stock.__module__}.{backend.stock.__name__}")
    with pytest.raises(RelayUnsupportedError, match=r"FlashAttentionBackend \(broken\)"):
        relay_choice.path_for_layer(name, selector_config(), None)


@pytest.mark.parametrize(
    ("options", "capability", "served_by"),
    [
        ({}, (9, 0), ["RelayNodesBackend", "RelayFlashBackend"]),
        ({}, (10, 3), ["RelayFlashInferBackend", "RelayNodesBackend", "RelayFlashBackend"]),
        ({}, (12, 0), ["RelayNodesBackend", "RelayFlashBackend"]),
        ({"cuda_kernels": "flash"}, (10, 0), ["RelayNodesBackend"]),
        ({"cuda_kernels": "flashinfer"}, (10, 0), ["RelayFlashInferBackend"]),
        ({"cuda_kernels": "triton"}, (10, 0), ["RelayFlashBackend"]),
        ({"schemas": ["trip.pml"]}, (10, 0), ["RelayFlashBackend"]),
    ],
)
def test_kernels_on_cuda_are_those_that_serve_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
    capability: tuple[int, int],
    served_by: list[str],
) -> None:
    """In vLLM's order, on each GPU; the log says why others do not serve."""
    config = SimpleNamespace(additional_config={"relay": options}, speculative_config=None)
    refused: list[str] = []
    logged: list[str] = []
    monkeypatch.setattr(
        relay_choice.logger, "info_once", lambda text, *args: logged.append(text % args)
    )
    monkeypatch.setattr(relay_choice, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(
        relay_choice, "_reasons_against",
        lambda path, *args, has_nodes=False: ["no"] * (has_nodes and path in refused),
    )  # fmt: skip

    def path() -> str:
        return relay_choice.path_for_layer(
            "RELAY", selector_config(), DeviceCapability(*capability)
        )

    for expected in served_by:
        assert path().rpartition(".")[2] == expected
        assert logged[-1].count("(no)") == len(refused)
        refused.append(path())
    if options.get("cuda_kernels", "triton") == "triton":
        return
    with pytest.raises(RelayUnsupportedError, match=r"shared prefixes .*Backend \(no\)"):
        path()


@pytest.mark.parametrize("kernels", ["flash", "flashinfer"])
def test_prompt_modules_are_refused_with_kernels_that_see_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    relay = {"cuda_kernels": kernels, "schemas": ["trip.pml"]}
    config = SimpleNamespace(additional_config={"relay": relay}, speculative_config=None)
    monkeypatch.setattr(relay_choice, "get_current_vllm_config_or_none", lambda: config)
    message = f"prompt modules .*cuda_kernels={kernels}: leave it out"
    with pytest.raises(RelayUnsupportedError, match=message):
        relay_choice.path_for_layer("RELAY", selector_config(), None)


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        ({"head_size": 256}, {}, None),
        ({"kv_cache_dtype": "fp8"}, {}, None),
        ({"has_sink": True}, {}, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "nvfp4"}, {}, "kv_cache_dtype"),
        ({"head_size": 96}, {}, "head_size"),
        ({"head_size": 512}, {}, "head_size"),
        ({}, {"use_trtllm_attention": False}, "use_trtllm_attention"),
        (
            {"kv_cache_dtype": "fp8"},
            {"disable_flashinfer_q_quantization": True},
            "disable_flashinfer_q_quantization",
        ),
        ({}, {"disable_flashinfer_q_quantization": True}, None),
        ({}, {"attn_logit_softcapping": 50.0}, "soft capping"),
        ({}, {"capability": (9, 0)}, "compute capability"),
        ({}, {"capability": (12, 0)}, "compute capability"),
        ({}, {"is_reachable": False}, "cannot get its kernels"),
    ],
)
def test_flashinfer_serves_what_its_kernels_for_decodes_do(
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    changes: dict[str, Any],
    reason: str | None,
) -> None:
    flashinfer_twin.stand_in(monkeypatch.setattr)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            use_trtllm_attention=changes.get("use_trtllm_attention"),
            disable_flashinfer_q_quantization=changes.get("disable_flashinfer_q_quantization"),
        ),
        cache_config=SimpleNamespace(cache_dtype=asked.get("kv_cache_dtype", "auto")),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(
                attn_logit_softcapping=changes.get("attn_logit_softcapping")
            )
        ),
    )
    is_reachable = changes.get("is_reachable", True)
    monkeypatch.setattr(relay_flashinfer, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(
        relay_flashinfer, "supports_trtllm_attention", lambda is_prefill=False: is_reachable
    )
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    path, _ = relay_choice.NODES["flashinfer"]
    reasons = relay_choice._reasons_against(
        path,
        selector_config(block_size=32)._replace(**asked),
        DeviceCapability(*changes.get("capability", (10, 0))),
        has_nodes=True,
    )
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_flashinfer_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = relay_choice.NODES["flashinfer"]
    for name in (path.rpartition(".")[0], "vllm.v1.attention.backends.flashinfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(vllm.v1.attention.backends, "flashinfer", raising=False)
    reasons = relay_choice._reasons_against(path, selector_config(), None, has_nodes=True)
    assert reasons == ["ModuleNotFoundError: No module named 'flashinfer'"]


@pytest.mark.parametrize(
    ("kernels", "faster", "served_by"),
    [
        ("auto", "triton", "RelayFlashBackend"),
        ("auto", "flash", "RelayNodesBackend"),
        ("auto", None, "RelayNodesBackend"),
        ("flash", "triton", "RelayNodesBackend"),
    ],
)
def test_what_was_measured_to_be_faster_is_taken(
    monkeypatch: pytest.MonkeyPatch, kernels: str, faster: str | None, served_by: str
) -> None:
    config = SimpleNamespace(additional_config={"relay": {"cuda_kernels": kernels}})
    asked = selector_config()
    shape = {"head_size": asked.head_size, "kv_bytes": 2}
    monkeypatch.setattr(relay_choice, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(relay_choice, "_reasons_against", lambda *args, **keywords: [])
    monkeypatch.setattr(relay_choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(relay_choice.torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(
        relay_choice,
        "faster_kernels",
        lambda name, **given: faster if (name, given) == ("A GPU", shape) else "other",
    )
    path = relay_choice.path_for_layer("RELAY", asked, None)
    assert path.rpartition(".")[2] == served_by


def test_batch_invariance_on_cuda_is_that_of_the_triton_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts included: with a stock backend a token's kernel would follow from how its request is
    cut into steps."""
    config = SimpleNamespace(additional_config={"relay": {}}, speculative_config=None)
    monkeypatch.setattr(relay_choice, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(relay_choice.envs, "VLLM_BATCH_INVARIANT", True)
    asked = selector_config()._replace(use_batch_invariant=True)
    module, _, cls = relay_choice.path_for_layer("RELAY", asked, None).rpartition(".")
    backend = getattr(importlib.import_module(module), cls)
    assert backend.supports_batch_invariance()
    assert backend.get_impl_cls().stock_impl_cls is None
    assert relay_choice.kernels_for(cast(Any, config)) == "triton"
    for name in ("RelayFlashBackend", "RelayTritonBackend"):
        assert not getattr(relay_stock, name).supports_batch_invariance()
    with pytest.raises(RelayUnsupportedError, match="with RELAY_SPARSE: use RELAY"):
        relay_choice.path_for_layer("RELAY_SPARSE", asked, None)
    config.additional_config = {"relay": {"cuda_kernels": "flash"}}
    with pytest.raises(RelayUnsupportedError, match="batch invariance .*leave it out"):
        relay_choice.path_for_layer("RELAY", asked, None)
