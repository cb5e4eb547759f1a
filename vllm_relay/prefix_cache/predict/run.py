# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict`: how many prompt tokens a prefix cache will save, before anything is run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from pydantic import ValidationError
from rich.console import Console

from vllm_relay.arguments import check_model, check_writable, reading_command_line
from vllm_relay.config import SCHEDULER_OPTIONS, EvictionPolicyName, RelayConfig
from vllm_relay.prefix_cache.predict.input import (
    LineError,
    PredictedRequest,
    read_lines,
    to_requests,
)
from vllm_relay.prefix_cache.predict.load import OFFLINE, Load, arrivals_of
from vllm_relay.prefix_cache.predict.report import (
    Scenario,
    as_dict,
    predictions_table,
    print_whole,
    replicas_table,
    sweep_plot,
)
from vllm_relay.prefix_cache.predict.step_costs import step_costs
from vllm_relay.progress import Show, showing_progress

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
    from vllm_relay.prefix_cache.predict.predictor import Prediction, Predictor

SCHEDULERS = ("stock", "relay")

ReplicaRows: TypeAlias = Callable[
    [
        "PredictorSettings",
        Sequence[PredictedRequest],
        "Sequence[CacheSize]",
        Load,
        Show,
    ],
    list[dict[str, Any]],
]
"""Predicts for several replicas: of the engine of each, the requests, the sizes of their caches,
when requests arrive and what a step takes, and what shows how far all of it is."""


def run_predict(
    path: Path,
    model: str | None = None,
    *,
    kv_cache_space: float | None = None,
    sweep: Sequence[float] = (),
    blocks: Sequence[int] = (),
    scheduler: str = "stock",
    eviction: str | None = None,
    block_size: int | None = None,
    kv_bytes_per_token: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    dtype: str | None = None,
    output_tokens: int | None = None,
    relay: str | None = None,
    arrivals: str = OFFLINE,
    step_ms: float | None = None,
    token_us: float | None = None,
    costs_path: Path | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    replica_rows: ReplicaRows | None = None,
    console: Console | None = None,
) -> int:
    """Predict what the prefix cache does for the requests of a file, and print it.

    The arguments are the options of `vllm-relay predict`, whose help says what they mean; None
    stands for a default; `replica_rows` predicts for several replicas, instead of for one. The
    result is printed to `console`, or to the standard output.

    Returns:
        0, or 1 if a line or what vLLM makes of the settings is refused; the reason is printed.

    Raises:
        CommandLineError: an option is refused, or the file cannot be read.
    """
    console = console or Console()
    with reading_command_line():
        eviction = _check_eviction(scheduler, eviction)
        scenarios = _scenarios(scheduler, arrivals)
        relay_options = _relay_options(scheduler, relay)
        has_clock = arrivals != OFFLINE or replica_rows is not None
        costs = step_costs(step_ms, token_us, costs_path, has_clock=has_clock)
        gib = sorted({*sweep, *([] if kv_cache_space is None else [kv_cache_space])})
        if not gib and not blocks:
            raise ValueError(
                "no cache size; give --kv-cache-space GIB, --sweep GIB,GIB,... or --blocks N,N,..."
            )
        for option, target in [("--json", json_path), ("--plot", plot_path)]:
            check_writable(option, target, path)
        if model is not None:
            check_model(model)
        _check_block_options(model, block_size, kv_bytes_per_token, gib)
    try:
        lines = read_lines(path)
        arrivals_s = arrivals_of(arrivals, lines)
        requests = to_requests(lines, output_tokens) if model is None else None
        with ExitStack() as stack:
            show = stack.enter_context(showing_progress("reading the requests"))
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
            from vllm_relay.prefix_cache.predict.engine import PredictorSettings, cache_sizes
            from vllm_relay.prefix_cache.predict.predictor import Predictor, encode

            settings = PredictorSettings(
                model=model or "",
                eviction=eviction,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                dtype=dtype,
                relay=relay_options,
            )
            if requests is None:
                requests = encode(lines, settings, output_tokens)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                settings = _without_model(settings, requests, Path(folder))
            with reading_command_line():
                sizes = cache_sizes(gib, blocks, block_size, kv_bytes_per_token)
            if replica_rows is not None:
                assert costs is not None
                chosen = settings.of_scheduler(scheduler)
                load = Load(costs, arrivals_s)
                rows = replica_rows(chosen, requests, sizes, load, show)
                print_whole(console, replicas_table(rows))
                if json_path is not None:
                    numbers = {"file": str(path), **asdict(costs), "replicas": rows}
                    json_path.write_text(json.dumps(numbers) + "\n")
                return 0
            cases = []
            for scenario in scenarios:
                predictor = Predictor(settings.of_scheduler(scenario.scheduler), requests)
                when_s = arrivals_s if scenario.is_online else None
                case_load = None if costs is None else Load(costs, when_s)
                cases.append((scenario, predictor, case_load))
            found, refused = _predict_sizes(cases, sizes, len(requests), show)
    except LineError as error:
        _print_message(console, f"{path}:{error.number}: {error.message}", "red")
        return 1
    except (OSError, ValueError) as error:
        _print_message(console, _reason(error, model), "red")
        return 1
    for message in refused:
        _print_message(console, message, "yellow")
    print_whole(console, predictions_table(found))
    if arrivals == OFFLINE and any(line.timestamp is not None for line in lines):
        console.print(
            "Timestamps are ignored: all requests are there at once. --arrivals timestamps heeds "
            "them.",
            highlight=False,
        )
    numbers = {
        "file": str(path),
        "model": model,
        "scheduler": scheduler,
        "eviction": eviction,
        "relay": relay_options,
        "arrivals": arrivals,
        "step_s": costs and costs.step_s,
        "token_s": costs and costs.token_s,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "predictions": [as_dict(scenario, prediction) for scenario, prediction in found],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(numbers, indent=2) + "\n")
    if plot_path is not None:
        policy = scheduler if eviction is None else f"{scheduler}, {eviction} eviction"
        asked_for = [prediction for scenario, prediction in found if scenario == scenarios[0]]
        plot_path.write_text(sweep_plot(asked_for, f"{path.name}: {policy}"))
    return 0


def _scenarios(scheduler: str, arrivals: str) -> list[Scenario]:
    """What is asked for, and what it is shown beside."""
    if arrivals == OFFLINE:
        return [Scenario(scheduler)]
    beside = [Scenario("stock", arrivals)] if scheduler != "stock" else []
    return [Scenario(scheduler, arrivals), *beside, Scenario(scheduler)]


def _predict_sizes(
    cases: Sequence[tuple[Scenario, Predictor, Load | None]],
    sizes: Sequence[CacheSize],
    num_requests: int,
    show: Show,
) -> tuple[list[tuple[Scenario, Prediction]], list[str]]:
    """Every scenario with every size that vLLM does not refuse; and what it says of the others.

    Raises:
        LineError: a request is refused.
        ValueError: every size is.
    """
    found: list[tuple[Scenario, Prediction]] = []
    refused: list[str] = []
    for number, size in enumerate(sizes):
        for case, (scenario, predictor, load) in enumerate(cases):
            what = f"a KV cache of {size}, {scenario}"
            begun = number * len(cases) + case

            def show_finished(finished: int, what: str = what, begun: int = begun) -> None:
                show(what, (begun + finished / num_requests) / (len(sizes) * len(cases)))

            try:
                prediction = predictor.predict(size, show_finished, load)
            except LineError:
                raise
            except ValueError as error:
                refused.append(str(error))
                break
            found.append((scenario, prediction))
    if not found:
        raise ValueError("\n".join(refused))
    return found, refused


def _reason(error: Exception, model: str | None) -> str:
    """One line, with the words of vLLM's checks and without their frame."""
    reason = str(error)
    if isinstance(error, ValidationError):
        reason = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    elif isinstance(error, OSError):
        reason = (
            f"--model {model}: cannot be loaded; give a folder, or a hub id that is cached: {error}"
        )
    return " ".join(reason.split())


def _print_message(console: Console, message: str, style: str) -> None:
    """On one line, however narrow the console is."""
    console.print(message, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _check_eviction(scheduler: str, eviction: str | None) -> str | None:
    """The policy of the relay scheduler, None with vLLM's own."""
    policies = get_args(EvictionPolicyName)
    if scheduler not in SCHEDULERS:
        raise ValueError(f"--scheduler {scheduler}: expected one of {', '.join(SCHEDULERS)}")
    if eviction is not None and eviction not in policies:
        raise ValueError(f"--eviction {eviction}: expected one of {', '.join(policies)}")
    if scheduler == "relay":
        return eviction or RelayConfig().eviction
    if eviction not in (None, "lru"):
        raise ValueError(
            f"--eviction {eviction}: vLLM's own scheduler evicts by lru only; give --scheduler "
            "relay, or leave --eviction out"
        )
    return None


def _relay_options(scheduler: str, relay: str | None) -> dict[str, Any]:
    """More options of the relay scheduler."""
    if relay is None:
        return {}
    if scheduler != "relay":
        raise ValueError(f"--relay {relay}: has no effect with --scheduler {scheduler}")
    known = sorted(SCHEDULER_OPTIONS - {"eviction"})
    try:
        options = json.loads(relay)
    except ValueError:
        options = None
    if not isinstance(options, dict) or not options.keys() <= set(known):
        raise ValueError(
            f"--relay {relay}: expected a JSON object with some of {', '.join(known)}, such as "
            '{"max_hold_s": 5}'
        )
    RelayConfig.from_options(options)
    return options


def _check_block_options(
    model: str | None, block_size: int | None, kv_bytes_per_token: int | None, gib: Sequence[float]
) -> None:
    """Without a model there is no default block size and no size of a block."""
    if model is not None:
        if kv_bytes_per_token is not None:
            raise ValueError(
                f"--kv-bytes-per-token {kv_bytes_per_token}: --model says it; give one of the two"
            )
        return
    missing = [] if block_size is not None else ["--block-size TOKENS"]
    if gib and kv_bytes_per_token is None:
        missing.append("--kv-bytes-per-token BYTES (or --blocks N in place of GiB)")
    if missing:
        raise ValueError(f"without --model, give {' and '.join(missing)}")


def _without_model(
    settings: PredictorSettings, requests: Sequence[PredictedRequest], folder: Path
) -> PredictorSettings:
    """Settings with a small model in `folder` that takes the longest of the requests."""
    longest = max(len(r.prompt_token_ids) + r.output_tokens for r in requests)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": max(longest, settings.max_model_len or 0),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return replace(settings, model=str(folder), max_model_len=settings.max_model_len or longest)
