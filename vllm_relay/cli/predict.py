# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

N = TypeVar("N", int, float)


def predict(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl",
            help="Requests: prompts, messages, token ids or a block-hash trace; docs/predictor.md.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub id; not needed for token ids and traces."),
    ] = None,
    kv_cache_space: Annotated[float | None, typer.Option(help="KV cache in GiB.")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="More sizes of the KV cache in GiB: 0.5,1,2,4.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="More sizes of the KV cache in KV blocks: 100,200.")
    ] = None,
    scheduler: Annotated[str, typer.Option(help="stock or relay.")] = "stock",
    eviction: Annotated[
        str | None,
        typer.Option(help="With the relay scheduler: queue or lru; queue if not said."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block; vLLM's default if not said.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache bytes of a token, where there is no --model."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As vLLM's option.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="As vLLM's option.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="As vLLM's option.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's option.")] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of each answer where its line does not say; 16."),
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option(help='More options of the relay scheduler: {"max_hold_s": 5}.'),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="offline: all requests are there at once. poisson:RATE, in requests per second, "
            "or timestamps of the lines: waits of a server, beside those of the stock scheduler."
        ),
    ] = "offline",
    step_ms: Annotated[
        float | None, typer.Option(help="What a step takes, in milliseconds; 8 if not said.")
    ] = None,
    token_us: Annotated[
        float | None,
        typer.Option(help="What a computed token adds to it, in microseconds; 35 if not said."),
    ] = None,
    costs_path: Annotated[
        Path | None,
        typer.Option(
            "--costs", help="Both, as `vllm-relay calibrate` measured them.", dir_okay=False
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Several engines, each with such a KV cache.")
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="Which replica gets a request: relay, round-robin, fewest-requests or hash; all "
            "of them if not said."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the results to.", dir_okay=False)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="SVG file to draw them in.", dir_okay=False)
    ] = None,
) -> None:
    """Predict the hit rate of the prefix cache without running the model.

    Exit status: 1 if a line of the input is refused, or what vLLM makes of the options.
    """
    from vllm_relay.prefix_cache.predict.run import run_predict

    replica_rows = None
    if replicas is None and router is not None:
        raise typer.BadParameter(f"--router {router}: give --replicas N too")
    if replicas is not None:
        if plot_path is not None:
            raise typer.BadParameter("--plot: has no effect with --replicas; leave it out")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
        from vllm_relay.cluster.predict import replica_rows as rows_of

        try:
            replica_rows = rows_of(replicas, router)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    status = run_predict(
        path,
        model,
        kv_cache_space=kv_cache_space,
        sweep=_numbers("--sweep", sweep, float),
        blocks=_numbers("--blocks", blocks, int),
        scheduler=scheduler,
        eviction=eviction,
        block_size=block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        dtype=dtype,
        output_tokens=output_tokens,
        relay=relay,
        arrivals=arrivals,
        step_ms=step_ms,
        token_us=token_us,
        costs_path=costs_path,
        json_path=json_path,
        plot_path=plot_path,
        replica_rows=replica_rows,
    )
    raise typer.Exit(status)


def _numbers(option: str, given: str | None, kind: Callable[[str], N]) -> list[N]:
    try:
        return [kind(number) for number in given.split(",")] if given else []
    except ValueError:
        raise typer.BadParameter(
            f"given {given!r}, expected numbers and commas: 1,2,4", param_hint=option
        ) from None
