# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict`: how many prompt tokens a prefix cache will save, before anything is run."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import ValidationError
from rich.console import Console

from vllm_relay.arguments import check_model, check_writable
from vllm_relay.config import EvictionPolicyName, RelayConfig
from vllm_relay.prefix_cache.predict.input import (
    InputLine,
    LineError,
    PredictedRequest,
    check_vocabulary,
    read_lines,
    text_without_model,
    to_requests,
)
from vllm_relay.prefix_cache.predict.report import (
    as_dict,
    prediction_table,
    print_whole,
    sweep_plot,
    sweep_table,
)

_MAX_GIB = 16384
_MAX_BLOCKS = 10_000_000  # they take half a minute and some GB to make

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
    from vllm_relay.prefix_cache.predict.predictor import Prediction

SCHEDULERS = ("stock", "relay")


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
    arrivals: str = "offline",
    json_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Predict what the prefix cache does for the requests of a file, and print it.

    Args:
        path: JSON Lines with the requests, in the order in which they are submitted.
        model: a Hugging Face folder or hub id; may be None where the file holds token ids or hash
            ids. Its weights are not read.
        kv_cache_space: size of the KV cache in GiB.
        sweep: more sizes, in GiB.
        blocks: more sizes, in KV blocks, as vLLM's num_gpu_blocks_override.
        scheduler: "stock" or "relay".
        eviction: policy of the relay scheduler, "queue" if None.
        block_size: tokens of a KV block; None for vLLM's default.
        kv_bytes_per_token: KV cache bytes of a token in all layers; needed without a model to turn
            GiB into blocks.
        max_num_seqs: as vLLM's option, like the next three.
        output_tokens: length of the answers where a line does not say, 16 if None.
        arrivals: "offline": all requests are there at once.
        json_path: where all numbers are written as JSON.
        plot_path: where the hit rate over the sizes is drawn as SVG.
        console: where to print; the standard output if None.

    Returns:
        0, or 1 if the input or a setting is refused; the reason is printed.
    """
    console = console or Console()
    try:
        eviction = _check_eviction(scheduler, eviction)
        if arrivals != "offline":
            raise ValueError(
                f"--arrivals {arrivals}: expected offline; timestamps are not simulated, since "
                "when a request meets a free engine depends on the speed of the machine"
            )
        gib = sorted({*sweep, *([] if kv_cache_space is None else [kv_cache_space])})
        if not gib and not blocks:
            raise ValueError(
                "no cache size; give --kv-cache-space GIB, --sweep GIB,GIB,... or --blocks N,N,..."
            )
        for option, target in [("--json", json_path), ("--plot", plot_path)]:
            check_writable(option, target, path)
        if model is not None:
            check_model(model)
        lines = read_lines(path)
        if model is None:
            _check_without_model(lines, block_size, kv_bytes_per_token, gib)
        elif kv_bytes_per_token is not None:
            raise ValueError(
                f"--kv-bytes-per-token {kv_bytes_per_token}: --model says it; give one of the two"
            )
        with ExitStack() as stack:
            status = stack.enter_context(console.status("reading the requests"))
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
            from vllm_relay.prefix_cache.predict.engine import PredictorSettings
            from vllm_relay.prefix_cache.predict.predictor import Predictor

            settings = PredictorSettings(
                model=model or "",
                eviction=eviction,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                dtype=dtype,
            )
            if model is None:
                requests = to_requests(lines, output_tokens)
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                settings = _without_model(settings, requests, Path(folder))
            else:
                requests = _encode(lines, settings, output_tokens)
            predictor = Predictor(settings, requests)
            predictions: list[Prediction] = []
            refused: list[str] = []
            for size in _sizes(gib, blocks, block_size, kv_bytes_per_token):

                def show(finished: int, what: str = f"a KV cache of {size}") -> None:
                    status.update(f"{what}: {finished:,} of {len(requests):,} requests")

                try:
                    predictions.append(predictor.predict(size, show))
                except LineError:
                    raise
                except ValueError as error:
                    refused.append(str(error))
            if not predictions:
                raise ValueError("\n".join(refused))
    except LineError as error:
        _print_message(console, f"{path}:{error.number}: {error.message}", "red")
        return 1
    except (OSError, ValueError) as error:
        _print_message(console, _reason(error, model), "red")
        return 1
    for message in refused:
        _print_message(console, message, "yellow")
    one = len(predictions) == 1
    print_whole(console, prediction_table(predictions[0]) if one else sweep_table(predictions))
    if any(line.timestamp for line in lines):
        console.print("Timestamps are ignored: all requests are there at once.", highlight=False)
    numbers = {
        "file": str(path),
        "model": model,
        "scheduler": scheduler,
        "eviction": eviction,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "predictions": [as_dict(prediction) for prediction in predictions],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(numbers, indent=2) + "\n")
    if plot_path is not None:
        policy = scheduler if eviction is None else f"{scheduler}, {eviction} eviction"
        plot_path.write_text(sweep_plot(predictions, f"{path.name}: {policy}"))
    return 0


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
    console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


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


def _check_without_model(
    lines: Sequence[InputLine],
    block_size: int | None,
    kv_bytes_per_token: int | None,
    gib: Sequence[float],
) -> None:
    """Without a model there is no tokenizer, no default block size and no size of a block."""
    text = next((line for line in lines if line.token_ids is None), None)
    if text is not None:
        raise text_without_model(text)
    missing = [] if block_size is not None else ["--block-size TOKENS"]
    if gib and kv_bytes_per_token is None:
        missing.append("--kv-bytes-per-token BYTES (or --blocks N in place of GiB)")
    if missing:
        raise ValueError(f"without --model, give {' and '.join(missing)}")


def _sizes(
    gib: Sequence[float],
    blocks: Sequence[int],
    block_size: int | None,
    kv_bytes_per_token: int | None,
) -> list[CacheSize]:
    from vllm_relay.prefix_cache.predict.engine import GIB_BYTES, CacheSize

    for option, size in [*(("GiB", g) for g in gib), *(("blocks", b) for b in blocks)]:
        if not 0 < size < float("inf"):
            raise ValueError(f"a KV cache of {size} {option}: expected more than 0")
    sizes = []
    for size in gib:
        if not 0 < size <= _MAX_GIB:
            raise ValueError(f"{size:g} GiB of KV cache: expected more than 0, at most {_MAX_GIB}")
        count = None
        if kv_bytes_per_token is not None and block_size is not None:
            count = math.floor(size * GIB_BYTES / (kv_bytes_per_token * block_size))
        sizes.append(CacheSize(size, count))
    sizes += [CacheSize(blocks=count) for count in sorted(set(blocks))]
    for each in sizes:
        if each.blocks is not None and each.blocks > _MAX_BLOCKS:
            raise ValueError(
                f"a KV cache of {each.blocks} blocks: expected at most {_MAX_BLOCKS}; where all "
                "requests fit, more changes nothing"
            )
    return sizes


def _encode(
    lines: Sequence[InputLine], settings: PredictorSettings, output_tokens: int | None
) -> list[PredictedRequest]:
    """The requests that `LLM.generate` and `LLM.chat` make of the lines."""
    from vllm_relay.prefix_cache.predict.engine import create_config
    from vllm_relay.prefix_cache.predict.predictor import Encoder

    config = create_config(settings)
    check_vocabulary(lines, config.model_config.get_vocab_size())
    if all(line.token_ids is not None for line in lines):
        return to_requests(lines, output_tokens)
    encoder = Encoder(settings)
    return to_requests(lines, output_tokens, encoder.text, encoder.chat)


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
