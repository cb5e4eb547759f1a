# SPDX-License-Identifier: Apache-2.0
"""What `serve run` is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay.cluster.ray.replica import parsed, serve_arguments
from vllm_relay.cluster.ray.serve import app


def test_options_are_those_of_vllm() -> None:
    options = {
        "model": "a/b",
        "max_model_len": "512",
        "max-num-seqs": 4,
        "enforce_eager": "true",
        "enable_prefix_caching": False,
        "additional_config": {"relay": {"routes": True}},
        "served_model_name": ["one", "two"],
        "cudagraph_capture_sizes": [1, 2],
        "quantization": None,
    }
    found = parsed(serve_arguments(options))
    assert (found.model, found.max_model_len, found.max_num_seqs) == ("a/b", 512, 4)
    assert found.enforce_eager is True and found.enable_prefix_caching is False
    assert found.additional_config == {"relay": {"routes": True}}
    assert found.served_model_name == ["one", "two"] and found.quantization is None
    assert found.cudagraph_capture_sizes == [1, 2]


def test_keys_of_an_option() -> None:
    options = {
        "additional_config.relay.scheduler": "true",
        "additional_config.relay.sharing": False,
        "additional-config.relay.log_every_s": 10,
        "max_model_len": 512,
    }
    for given in (options, dict(reversed(options.items()))):
        found = parsed(serve_arguments({"model": "m", **given}))
        relay = {"scheduler": True, "sharing": False, "log_every_s": 10}
        assert found.additional_config == {"relay": relay} and found.max_model_len == 512


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model": 5}, "model=5 given: add model="),
        (
            {"model": "m", "config": "/no/such.yaml"},
            "/no/such.yaml given, which vLLM refuses: FileNotFound",
        ),
        ({}, "no model given: add model="),
        ({"model": "m", "replicas": "two"}, "replicas=two given, expected at least 1, an integer"),
        ({"model": "m", "endpoints": 0}, "endpoints=0 given, expected at least 1, an integer"),
        ({"model": "m", "port": "80"}, "port=80 given: Ray Serve listens: serve start --http-port"),
        ({"model": "m", "ssl_keyfile": "k"}, "ssl_keyfile=k given: Ray Serve listens: give ssl_"),
        (
            {"model": "m", "root-path": "/a"},
            "root_path=/a given: Ray Serve listens",
        ),
        ({"model": "m", "uvicorn_log_level": "info"}, "uvicorn_log_level=info given: Ray Serve"),
        ({"model": "m", "data_parallel_size": 2}, "data_parallel_size=2 given: give replicas"),
        ({"model": "m", "data-parallel-size": 2}, "data_parallel_size=2 given"),
        ({"model": "m", "data_parallel_rank": 1}, "data_parallel_rank=1 given: give replicas"),
        ({"model": "m", "nnodes": 2}, "nnodes=2 given: a replica is on one machine"),
        ({"model": "m", "grpc": True}, "grpc=True given: Ray Serve listens, over HTTP"),
        (
            {"model": "m", "enable_auto_tool_choice": True, "tool_call_parser": "nosuch"},
            "nosuch given, which vLLM refuses: .*nosuch",
        ),
        (
            {"model": "m", "reasoning_parser": "nosuch"},
            "nosuch given, which vLLM refuses: .*[Rr]easoning parser 'nosuch' not found",
        ),
        (
            {"model": "m", "enable_auto_tool_choice": True},
            "which vLLM refuses: .*requires --tool-call-parser",
        ),
        (
            {"model": "m", "chat_template": "nosuch.jinja"},
            "nosuch.jinja given, which vLLM refuses: ",
        ),
        ({"model": "m", "nosuch": 1}, "--nosuch 1 given, which vLLM refuses: .*nosuch"),
        ({"model": "m", "max_num_seqs": "x"}, "which vLLM refuses: argument --max-num-seqs"),
        ({"model": "m", "gpus": "x"}, "gpus=x given, expected a number"),
        ({"model": "/no/such/folder"}, "/no/such/folder: no config.json there"),
    ],
)
def test_what_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        app(args)


def test_an_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    args = {"model": ".", "replicas": "3", "endpoints": 2, "tensor_parallel_size": "2"}
    endpoint = app(args)._bound_deployment
    (replicas,) = (each._bound_deployment for each in endpoint.init_args)
    assert (endpoint.num_replicas, replicas.num_replicas) == (2, 3)
    (arguments,) = replicas.init_args
    assert parsed(arguments).model == str(tmp_path.resolve())
    assert parsed(arguments).distributed_executor_backend == "mp"
    assert replicas.ray_actor_options == {"num_cpus": 0, "num_gpus": 0}
    args["prefill_context_parallel_size"] = 3
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm_relay.cluster.ray.serve.current_platform", platform)
    (replicas,) = (each._bound_deployment for each in app(args)._bound_deployment.init_args)
    assert replicas.ray_actor_options["num_gpus"] == 6
    args["gpus"] = "0.5"
    (replicas,) = (each._bound_deployment for each in app(args)._bound_deployment.init_args)
    assert replicas.ray_actor_options["num_gpus"] == 0.5


PLUGIN = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

ReasoningParserManager.register_module("of_this_test", module=DeepSeekR1ReasoningParser)
"""


def test_files_are_found_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "plugin_of_this_test.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    args = {
        "model": "m",
        "chat_template": "chat.jinja",
        "reasoning_parser_plugin": "plugin_of_this_test.py",
        "reasoning_parser": "of_this_test",
    }
    (replicas,) = (each._bound_deployment for each in app(args)._bound_deployment.init_args)
    (arguments,) = replicas.init_args
    monkeypatch.chdir("/")
    found = parsed(arguments)
    assert found.chat_template == str(tmp_path / "chat.jinja")
    assert found.reasoning_parser_plugin == str(tmp_path / "plugin_of_this_test.py")


def test_a_template_is_no_file() -> None:
    args = {"model": "m", "chat_template": "{{ messages }}" * 1000}
    (replicas,) = (each._bound_deployment for each in app(args)._bound_deployment.init_args)
    (arguments,) = replicas.init_args
    assert parsed(arguments).chat_template == args["chat_template"]
