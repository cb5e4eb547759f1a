# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay tune`: measures the Triton kernels on this GPU and stores what is fastest; with
`--sparse`, searches of key indexes on this CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_relay.arguments import CommandLineError
from vllm_relay.progress import showing_progress

if TYPE_CHECKING:
    from vllm_relay.attention_backends.cuda.config import KernelConfig
    from vllm_relay.attention_backends.cuda.tune import Bench, Load, Result

DTYPES = ("bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8")
ROWS_SHOWN = 12


def run_tune(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    kv_dtype: str | None,
    block_size: int,
    folder: Path | None,
    console: Console | None = None,
) -> int:
    """Measure, show and store. Returns the exit status.

    Raises:
        CommandLineError: an argument is refused.
    """
    console = console or Console(soft_wrap=True)
    try:
        import torch

        from vllm_relay.attention_backends.cuda import config as gpu_config
        from vllm_relay.attention_backends.cuda import tune as gpu_tune
        from vllm_relay.limits import HEAD_SIZES, check_capability
    except ImportError as error:
        console.print(f"tune: {error}; `vllm-relay doctor` says what to do", style="red")
        return 1
    problems = [
        (dtype not in DTYPES, f"--dtype: given {dtype!r}, expected {' or '.join(DTYPES)}"),
        (
            kv_dtype not in (None, *KV_DTYPES),
            f"--kv-dtype: given {kv_dtype!r}, expected {', '.join(KV_DTYPES)}",
        ),
        (
            head_size not in HEAD_SIZES,
            f"--head-size: given {head_size}, expected {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} in "
            "steps of 16",
        ),
        (
            num_heads % num_kv_heads != 0,
            f"--heads: given {num_heads}, expected a multiple of --kv-heads, {num_kv_heads}",
        ),
        (
            block_size % 16 != 0,
            f"--block-size: given {block_size}, expected a multiple of 16",
        ),
    ]
    for is_problem, message in problems:
        if is_problem:
            raise CommandLineError(message)
    if not torch.cuda.is_available():
        console.print(
            "tune: no CUDA GPU was found, and the CPU kernels need no tuning; for searches of key "
            "indexes on this CPU: vllm-relay tune --sparse",
            style="red",
        )
        return 1
    gpu_name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    path = gpu_config.tuned_path(gpu_name, folder)
    _check_folder(path.parent)
    try:
        check_capability(capability, kv_dtype)
        gpu_config.read_tuned(path)
    except (OSError, ValueError) as error:
        console.print(f"tune: {error}", style="red")
        return 1
    kv_types = {"fp8": torch.float8_e4m3fn}
    shape = gpu_tune.Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=getattr(torch, dtype),
        kv_dtype=kv_types.get(kv_dtype or "", getattr(torch, kv_dtype or dtype, None)),
        block_size=block_size,
    )
    configs = gpu_tune.candidates(capability, head_size, shape.kv_dtype.itemsize)
    bench = gpu_tune.Bench(shape, "cuda", gpu_tune.LOADS)
    console.print(f"{gpu_name}: {len(configs)} configurations, {len(bench.loads)} batches each")
    results: list[Result] = []
    with showing_progress("measuring") as show:
        for result in gpu_tune.measure(bench, configs):
            results.append(result)
            show(f"{len(results)} of {len(configs)}", len(results) / len(configs))
    console.print(results_table(results, bench.loads))
    try:
        best = gpu_tune.best_of(results)
    except RuntimeError as error:
        console.print(f"tune: {error}", style="red")
        return 1
    config = best.config
    try:
        config = gpu_tune.with_costs(bench, config)
    except ValueError as error:
        console.print(f"tune: the costs stay as they ship: {error}", style="yellow")
    key = gpu_config.config_key(head_size, shape.kv_dtype.itemsize)
    try:
        faster = compare_with_flash(bench, config, console)
    except ValueError as error:
        console.print(f"tune: {error}", style="red")
        return 1
    import triton

    facts = {"gpu": gpu_name, "torch": torch.__version__, "triton": triton.__version__}
    gpu_config.write_tuned(path, {key: config}, facts, {key: faster} if faster else {})
    console.print(f"{key}: {config}\nstored in {path}")
    if path.parent == gpu_config.tuned_folder():
        console.print("vLLM takes it when it starts")
    else:
        console.print(f"vLLM takes it when it starts with VLLM_RELAY_CACHE={path.parent}")
    return 0


def compare_with_flash(bench: Bench, config: KernelConfig, console: Console) -> str | None:
    """Which of `cuda_kernels` is faster for this shape; None where FlashAttention is not at hand,
    or would take other queries.

    Raises:
        ValueError: results differ.
    """
    if bench.shape.kv_dtype != bench.shape.dtype:
        console.print("fp8 caches: FlashAttention takes queries in fp8, and is not compared")
        return None
    try:
        from vllm.v1.attention.backends import fa_utils

        from vllm_relay.attention_backends.cuda.flash import tune as flash_tune

        version = fa_utils.get_flash_attn_version(head_size=bench.shape.head_size)
        flash_attention = fa_utils.flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        console.print(f"FlashAttention is not at hand, and is not compared: {error}")
        return None
    compared = flash_tune.compare(bench, bench.planner(config), flash_attention, fa_version=version)
    table = Table(title="microseconds per layer")
    for name in ("batch", "flash", "triton", "FlashAttention alone"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in compared:
        load = each.load
        times_us = (each.flash_us, each.triton_us, each.stock_us)
        table.add_row(
            f"{load.requests} in {load.groups} x {load.prefix_tokens}",
            *(f"{time_us:.1f}" for time_us in times_us),
        )
    console.print(table)
    faster = flash_tune.faster_of(compared)
    console.print(f"faster: {faster}, which cuda_kernels=auto takes for this shape")
    return faster


def run_sparse_tune(*, folder: Path | None, console: Console | None = None) -> int:
    """Measure what searches cost, show and store it. Returns the exit status."""
    from vllm_relay.sparse.plan.cost_calibration import GROUP, SIZES, calibrate_costs
    from vllm_relay.sparse.plan.search_cost import SearchWork, costs_path

    console = console or Console(soft_wrap=True)
    path = costs_path(folder)
    _check_folder(path.parent)
    # a size takes about as long as it is large
    parts_done = iter([sum(SIZES[:number]) / sum(SIZES) for number in range(len(SIZES))])
    with showing_progress("measuring") as show:
        costs = calibrate_costs(folder=folder, progress=lambda what: show(what, next(parts_done)))
    for num_keys in costs.sizes:
        times = [
            costs.time_us(SearchWork(kind, num_keys, GROUP, found=num_keys * GROUP, **work))
            for kind, work in (("full", {}), ("flat", {"distances": num_keys}))
        ]
        console.print(
            f"{num_keys} keys, {GROUP} queries: reading all {times[0]:.0f} us, scanning codes and "
            f"finding all {times[1]:.0f} us"
        )
    console.print(f"stored in {path}")
    return 0


def _check_folder(folder: Path) -> None:
    """Better known before minutes of measuring.

    Raises:
        CommandLineError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{error}; name a folder that can be written to with --folder"
        raise CommandLineError(message) from error


def results_table(results: list[Result], loads: tuple[Load, ...]) -> Table:
    """The fastest configurations first."""
    table = Table(title="microseconds per layer")
    for name in ("rows", "warps", "stages", "per SM", "same bits"):
        table.add_column(name, no_wrap=True)
    for load in loads:
        table.add_column(
            f"{load.requests} in {load.groups} x {load.prefix_tokens}", justify="right"
        )
    table.add_column("mean", justify="right")
    for result in sorted(results, key=lambda result: result.mean_us)[:ROWS_SHOWN]:
        config = result.config
        table.add_row(
            f"{config.small_rows}, {config.large_rows}",
            str(config.num_warps),
            str(config.num_stages),
            str(config.programs_per_sm),
            "yes" if result.is_invariant else "no",
            *(f"{time_us:.1f}" for time_us in result.times_us or [float("nan")] * len(loads)),
            f"{result.mean_us:.1f}",
        )
    return table
