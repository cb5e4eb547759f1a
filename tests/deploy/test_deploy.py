# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerts and values name what there is: metrics by their names, options as vLLM takes
them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_relay.attention_backends import step_stats
from vllm_relay.long_context import orders as long_contexts
from vllm_relay.prefix_cache import stats as prefix_cache

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, ROUTER = ROOT / "deploy", ROOT / "vllm_relay" / "cluster" / "ray" / "router.py"
PROMETHEUS = DEPLOY / "prometheus"
NAME = re.compile(r"\b(?:relay:|vllm:|ray_)[a-z_]+")
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@functools.cache
def source_of(module: str) -> str:
    """Without importing it."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.joinpath(*rest.split(".")).with_suffix(".py").read_text()


def dashboard_module() -> Any:
    spec = importlib.util.spec_from_file_location("dashboard", DEPLOY / "grafana" / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DASHBOARD = json.loads((DEPLOY / "grafana" / "relay.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


with_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Debian's package prometheus, as .ci/run has it"
)


def ours() -> dict[str, str]:
    """Names as Prometheus has them, and their help texts."""
    counters: dict[str, str] = {
        **step_stats.COUNTERS, **long_contexts.COUNTERS, **prefix_cache.COUNTERS,
        **prefix_cache.TENANT_COUNTERS,
        prefix_cache.EVICTED_BLOCKS: prefix_cache.EVICTED_BLOCKS_TEXT,
    }  # fmt: skip
    gauges = {**step_stats.GAUGES, **long_contexts.GAUGES, **prefix_cache.GAUGES}
    names = {f"{step_stats.prometheus_name(name)}_total": text for name, text in counters.items()}
    return names | {step_stats.prometheus_name(name): text for name, text in gauges.items()}


def known(name: str) -> bool:
    if name.startswith("relay:"):
        return name in ours()
    bare = name.removesuffix("_total")
    for suffix in HISTOGRAM_SUFFIXES:
        bare = bare.removesuffix(suffix)
    if name.startswith("ray_relay_"):
        return f'"{bare.removeprefix("ray_")}"' in ROUTER.read_text()
    theirs = bare.replace("ray_vllm_", "vllm:")
    return f'"{theirs}"' in source_of("vllm.v1.metrics.loggers")


def test_the_dashboard_is_what_its_source_writes() -> None:
    assert dashboard_module().dashboard() == DASHBOARD


def test_all_metrics_are_on_it_and_say_what_they_are() -> None:
    shown = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    assert ours().keys() <= shown
    assert all(text.endswith(".") for text in ours().values())
    assert all(panel["description"].endswith(".") for panel in PANELS)


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(alert["expr"] for alert in ALERTS)])
def test_what_is_asked_for_is_there(expression: str) -> None:
    names = NAME.findall(expression)
    assert names
    assert [name for name in names if not known(name)] == []


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_each_alert_is_tested() -> None:
    tests = (PROMETHEUS / "alerts_test.yaml").read_text()
    assert [alert["alert"] for alert in ALERTS if alert["alert"] not in tests] == []


@with_promtool
@pytest.mark.parametrize(
    "arguments", ["check config prometheus.yaml", "check rules alerts.yaml",
                  "test rules alerts_test.yaml"],
)  # fmt: skip
def test_prometheus_takes_them(arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_prometheus_can_read_every_panel(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}",
         "expr": re.sub(r"\$__rate_interval", "1m", re.sub(r"\$[a-z_]+\b(?=\")", ".*", each))}
        for number, each in enumerate(EXPRESSIONS)
    ]  # fmt: skip
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def served_options() -> list[Any]:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    values = yaml.safe_load((DEPLOY / "helm" / "production-stack.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    return [
        pytest.param(compose["services"]["vllm"]["command"], id="compose"),
        pytest.param(model["vllmConfig"]["extraArgs"], id="helm"),
    ]


@pytest.mark.parametrize("options", served_options())
def test_vllm_takes_the_options(options: list[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(options)
    assert str(parsed.attention_backend).lower() == "relay"
    assert parsed.additional_config == {"relay": {"scheduler": True}}


def test_mounted_files_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()
