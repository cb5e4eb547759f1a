# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_processes import run_module
from tests.tables.fake_engine import FakeEngine
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.limits import RelayUnsupportedError
from vllm_relay.tables import open_engine


def test_an_engine_is_given_back() -> None:
    engine = RecordingEngine()
    assert open_engine(engine) is engine


def test_a_server_is_reached_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class ServerEngine:
        def __init__(self, base_url: str, **arguments: Any) -> None:
            self.given = (base_url, arguments)

    module = type(sys)("vllm_relay.tables.engines.server.engine")
    module.ServerEngine = ServerEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    opened: Any = open_engine("http://localhost:8000", model="m")
    assert opened.given == ("http://localhost:8000", {"model": "m"})
    opened = open_engine("HTTPS://host")
    assert opened.given == ("HTTPS://host", {})


@pytest.mark.parametrize(
    ("engine", "arguments", "error", "message"),
    [
        (3, {}, TypeError, "engine 3 given, expected a model"),
        (None, {}, TypeError, "engine None given"),
        (RecordingEngine, {}, TypeError, "RecordingEngine"),
        ("", {}, ValueError, "an empty engine"),
        ("host:80", {}, ValueError, "engine 'host:80' given, expected .* give 'http://host:80'"),
        ("10.0.0.1:80/v1", {}, ValueError, "for a server give 'http://10.0.0.1:80/v1'"),
        ("models/of/mine", {}, ValueError, "engine models/of/mine: no such folder; expected a Hug"),
        ("/models/mine", {}, ValueError, "engine /models/mine: no config.json there; expected"),
        (Path("~/mine"), {}, ValueError, "engine ~/mine: no config.json there; expected"),
        ("host", {"model": "m"}, ValueError, "'host' given with model='m', expected a model alone"),
        (
            RecordingEngine(),
            {"dtype": "float32"},
            ValueError,
            r"\['dtype'\] given with a Recording",
        ),
    ],
)
def test_anything_else_is_refused(
    engine: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_engine(engine, **arguments)


class FakeLLM:
    """Stands for ``vllm.LLM``, which would take a model."""

    refuses: tuple[str, ...] = ()

    def __init__(self, model: str, **arguments: Any) -> None:
        self.given = {"model": model, **arguments}
        if arguments.get("attention_backend") in self.refuses:
            error = RelayUnsupportedError(["heads of size 20: use another backend", "MLA"])
            raise ValueError(
                f"1 validation error for VllmConfig\n  Value error, {error} [type=value_error, "
                f"input_value=ArgsKwargs(...)]\n    For further information visit a page"
            )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm")
    from vllm_relay.tables.engines import in_process as started

    monkeypatch.setattr(FakeLLM, "refuses", ())
    monkeypatch.setattr(started, "LLM", FakeLLM)
    monkeypatch.setattr(started, "StartedEngine", lambda llm: llm)
    return started


RELAY = {"relay": {"scheduler": True}}


def test_a_model_starts_with_relay(started: Any) -> None:
    opened: Any = open_engine("a/model", dtype="float32")
    assert opened.given == {
        "model": "a/model",
        "dtype": "float32",
        "enable_prefix_caching": True,
        "attention_backend": "relay",
        "additional_config": RELAY,
    }


def test_arguments_win(started: Any) -> None:
    opened: Any = open_engine(
        Path("folder"),
        attention_backend="CPU_ATTN",
        enable_prefix_caching=False,
        additional_config={"relay": {}, "other": 1},
    )
    assert opened.given == {
        "model": "folder",
        "enable_prefix_caching": False,
        "attention_backend": "CPU_ATTN",
        "additional_config": {"relay": {}, "other": 1},
    }
    opened = open_engine("m", scheduler_cls="a.Scheduler")
    assert "additional_config" not in opened.given


def test_a_model_that_relay_cannot_serve_starts_without(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeLLM, "refuses", ("relay",))
    with caplog.at_level(logging.WARNING, logger="vllm.relay"):
        opened: Any = open_engine("m")
    assert "attention_backend" not in opened.given
    assert opened.given["additional_config"] == RELAY
    refusal = "relay cannot serve heads of size 20: use another backend; relay cannot serve MLA"
    assert caplog.messages == [f"vllm-relay: {refusal}; m starts with vLLM's own attention backend"]
    with pytest.raises(ValueError, match="heads of size 20"):
        open_engine("m", attention_backend="relay")


def test_a_model_that_is_not_there_is_told_in_a_sentence(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeLLM, model: str, **_: Any) -> None:
        raise FileNotFoundError("Cannot find a snap\nand outgoing traffic is disabled.")

    monkeypatch.setattr(FakeLLM, "__init__", refuse)
    with pytest.raises(ValueError, match=r"'a/model' cannot be loaded \(Cannot find a snap and"):
        open_engine("a/model")


SERVER_LIST = ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ([], {}, "an empty list of engines"),
        (["http://a", "a/model"], {}, "a list of engines with 'a/model' given, .* replicas="),
        (["http://a", RecordingEngine()], {}, "a list of engines with RecordingEngine"),
        (["http://a", "http://b", "http://a"], {}, "servers 'http://a' and 'http://a' given"),
        ("m", {"replicas": "2"}, "replicas='2' given, expected at least 1, an integer"),
        ("http://a", {"replicas": 0}, "replicas=0 given, expected at least 1"),
        ("http://a", {"replicas": 2}, "replicas=2 given, which is for a model that is started"),
        (SERVER_LIST, {"replicas": 2}, "replicas=2 given, .* list of their addresses"),
        (RecordingEngine(), {"replicas": 2}, "replicas=2 given, which is for a model"),
        ("m", {"replicas": 0}, "replicas=0 given, expected at least 1"),
        ("m", {"data_parallel_ranks": 2}, "data_parallel_ranks=2 given, which is for servers"),
        ("http://a", {"data_parallel_ranks": 0}, "data_parallel_ranks=0 given, expected at least"),
        ("m", {"replicas": 2, "data_parallel_size": 2}, "data_parallel_size=2 and replicas=2"),
        ("m", {"kv_events": ["tcp://a:1"]}, "kv_events given, which are those of servers"),
        (SERVER_LIST, {"kv_events": "tcp://a:1"}, "of 1 servers given, expected those of 2"),
        (SERVER_LIST, {"kv_events": [None, None]}, "of its own for each server"),
        (SERVER_LIST, {"kv_events": ["tcp://a:1", "tcp://a:1"]}, "of its own for each server"),
        (
            "http://a",
            {"data_parallel_ranks": 2, "kv_events": ["ipc:///a"]},
            "'ipc:///a' given with ranks",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    engine: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(engine, **arguments)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for ``ServerEngine``."""

    class Server(FakeEngine):
        def __init__(self, base_url: str, **arguments: Any) -> None:
            super().__init__(tokenizer="a tokenizer")
            self.given = base_url, {**arguments, "patience_s": arguments.pop("retries").patience_s}
            self.given[1].pop("retries")

    monkeypatch.setattr("vllm_relay.tables.engines.server.engine.ServerEngine", Server)
    return Server


NAMES = {
    "localhost": ["::1", "127.0.0.1"],
    "gpu1": ["10.0.0.1"],
    "gpu1.cluster": ["10.0.0.1", "fd00::1"],
    "one.proxy": ["10.0.0.9"],
    "two.proxy": ["10.0.0.9"],
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: None) -> list[Any]:
        if host not in NAMES and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(0, 0, 0, "", (found, 0)) for found in NAMES.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000", "http://[::1]:8000/v1"),
        ("http://0.0.0.0:8000", "http://localhost:8000"),
        ("http://a", "http://A/v1/"),
        ("http://a", "http://a:80"),
        ("https://a./llm", "https://a:443/llm/v1"),
        ("http://gpu1:8000", "http://10.0.0.1:8000"),
        ("http://gpu1:8000", "http://gpu1.cluster:8000"),
        ("http://gpu1.cluster:8000", "http://gpu1:8000"),
    ],
)
def test_one_server_under_two_names_is_no_two(names: None, one: str, other: str) -> None:
    with pytest.raises(ValueError, match="which are one: give each server once") as refused:
        open_engine(["http://b", one, other])
    assert one in str(refused.value) and other in str(refused.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8001"),
        ("http://localhost:8000/one", "http://127.0.0.1:8000/two"),
        ("http://localhost:8000", "http://gpu1:8000"),
        ("http://localhost:8000", "http://unknown:8000"),
        ("http://unknown:8000", "http://unknown.cluster:8000"),
        ("http://gpu1:8000", "http://10.0.0.2:8000"),
        ("https://one.proxy", "https://two.proxy"),
        ("http://a", "https://a"),
    ],
)
def test_servers_that_may_be_two_are(names: None, servers: Any, one: str, other: str) -> None:
    opened: Any = open_engine([one, other])
    assert [each.given[0] for each in opened.engines] == [one, other]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_events": ["tcp://a:1", "tcp://b:1"]}, "does not say its block size"),
        ({"identities": {"http://b": "other"}}, "different models given"),
        ({"identities": {"http://b": None}}, "http://b is refused"),
    ],
)
def test_servers_that_are_refused_together_are_closed(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    opened: list[FakeEngine] = []

    def start(address: str, *, identities: Any = None, **_: Any) -> FakeEngine:
        identity = (identities or {}).get(address, "m")
        if identity is None:
            raise ValueError(f"{address} is refused")
        opened.append(FakeEngine(identity=identity, tokenizer="a tokenizer"))
        return opened[-1]

    monkeypatch.setattr("vllm_relay.tables.engines.server.engine.ServerEngine", start)
    with pytest.raises(ValueError, match=message):
        open_engine(SERVER_LIST, **arguments)
    assert opened and all(each.is_closed for each in opened)


def test_several_servers_are_one_engine(servers: Any) -> None:
    opened: Any = open_engine(SERVER_LIST, model="m")
    given: dict[str, Any] = {"model": "m", "patience_s": 60.0}
    assert [each.given for each in opened.engines] == [
        ("http://a", given),
        # loaded once
        ("http://b", {**given, "tokenizer": "a tokenizer"}),
    ]


def test_ranks_of_servers_are_engines(servers: Any) -> None:
    opened: Any = open_engine(SERVER_LIST, data_parallel_ranks=2)
    found = [(each.given[0], each.given[1]["data_parallel_rank"]) for each in opened.engines]
    assert found == [("http://a", 0), ("http://a", 1), ("http://b", 0), ("http://b", 1)]


def test_ray_starts_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("vllm_relay.tables.engines.ray_actors.starting")
    module.start_replicas = lambda *given, **arguments: (given, arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert open_engine("m", replicas=3, dtype="float32") == (("m", 3), {"dtype": "float32"})


def test_without_ray_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("starting", "engine"):
        module = f"vllm_relay.tables.engines.ray_actors.{name}"
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ValueError, match=r"run pip install 'vllm-relay\[ray\]'"):
        open_engine("m", replicas=2)


def test_one_replica_is_started_in_this_process(started: Any) -> None:
    assert open_engine("m", replicas=1).given["model"] == "m"  # type: ignore[attr-defined]


def test_the_package_imports_what_is_asked_for_only() -> None:
    program = (
        "import sys, vllm_relay.tables as tables;"
        "heavy = ('torch', 'transformers', 'vllm', 'duckdb', 'pyarrow', 'pandas', 'polars');"
        "print([name for name in heavy if name in sys.modules]);"
        "from vllm_relay.tables import open_engine, Question, Output, JobOptions, PromptTemplate;"
        "print([name for name in heavy if name in sys.modules]);"
        "import vllm_relay.tables.dataframes;"
        "from vllm_relay.tables import llm_map;"
        "print([name for name in heavy if name in sys.modules], callable(llm_map),"
        " callable(open_engine), 'connect' in dir(tables))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "['duckdb', 'pyarrow'] True True True"]


def test_unknown_names_are_no_attributes() -> None:
    import vllm_relay.tables

    with pytest.raises(AttributeError, match="no attribute 'llm_reduce'"):
        _ = vllm_relay.tables.llm_reduce


@pytest.mark.integration
def test_a_model_answers_and_is_closed(tmp_path: Path) -> None:
    done = run_module(
        "tests.tables.llm_map_main", [str(tmp_path)], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    words = ["golden owl", "amber falcon", "golden owl"]
    assert [text.strip() for text in answers["opened"]] == words
    assert [text.strip() for text in answers["again"]] == words
    assert answers["one_word"] == ["golden", "amber", "golden"]
    assert answers["num_prompts"] == 2
    assert answers["backend"] == "RELAY"
