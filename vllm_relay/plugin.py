# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told at start-up. ``register`` runs in every process of vLLM."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_relay.limits import (
    BACKEND_NAME,
    BACKEND_NAMES,
    SPARSE_BACKEND_NAME,
    check_capability,
    check_config,
    check_layer,
    check_sparse_config,
    relay_is_selected,
    sparse_is_selected,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34")
CPU_BACKEND_PATH = "vllm_relay.attention_backends.cpu.relay.RelayBackend"
SPARSE_BACKEND_PATH = "vllm_relay.attention_backends.sparse.cpu.RelaySparseBackend"
CUDA_BACKEND_PATH = "vllm_relay.attention_backends.cuda.relay.RelayCudaBackend"
SPARSE_CUDA_BACKEND_PATH = "vllm_relay.attention_backends.sparse.cuda.RelaySparseCudaBackend"


def register() -> None:
    """Register the RELAY attention backend with vLLM (entry point ``vllm.general_plugins``).

    Safe to call any number of times. Never raises: a vLLM that uses another backend must start
    whatever is wrong here, and one that asks for RELAY then says that it is unknown.
    """
    from vllm import __version__ as vllm_version
    from vllm.logger import init_logger

    logger = init_logger("vllm.relay")
    if not is_supported(vllm_version):
        logger.error(
            "vllm-relay: vLLM %s was found, vLLM %s is supported; the RELAY attention backend is "
            "not registered. Install a supported vLLM or the vllm-relay release made for this one.",
            vllm_version,
            SUPPORTED_VLLM,
        )
        return
    try:
        _register_backend()
    except Exception:
        logger.exception("vllm-relay: the RELAY attention backend could not be registered")
        return
    try:
        _register_stats()
    except Exception:
        logger.warning("vllm-relay: the metrics relay:* are not available", exc_info=True)


def restore_backend(name: str) -> Any:
    """A member of vLLM's AttentionBackendEnum, registered first where it is not yet.

    Pickled configurations name this function: a spawned process calls it before it loads plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[name]


def is_supported(vllm_version: str) -> bool:
    """Whether this package works with the given vLLM version."""
    try:
        return Version(vllm_version).base_version in SUPPORTED_VLLM
    except InvalidVersion:
        return False


def _register_backend() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_relay import wiring
    from vllm_relay.vllm_changes import configuration, platform
    from vllm_relay.vllm_changes.worker import torch_math

    torch_math.choose_math_kernels()
    platform_cls = type(current_platform)
    platform.run_on_new_config(platform_cls, check_new_config)
    configuration.mark_offline_engines()
    configuration.tell_refusals_alone()
    wiring.hide_tokens_of_modules()
    wiring.check_modular_requests()
    wiring.prepare_engine_cores()
    paths = {BACKEND_NAME: CPU_BACKEND_PATH, SPARSE_BACKEND_NAME: SPARSE_BACKEND_PATH}
    if current_platform.is_cpu():
        path_for_layer = dict.fromkeys(BACKEND_NAMES, cpu_backend_path)
        platform.let_platform_select(platform_cls, path_for_layer)
    elif current_platform.is_cuda():
        paths = {BACKEND_NAME: CUDA_BACKEND_PATH, SPARSE_BACKEND_NAME: SPARSE_CUDA_BACKEND_PATH}
        path_for_layer = dict.fromkeys(BACKEND_NAMES, cuda_backend_path)
        platform.let_platform_select(platform_cls, path_for_layer)
    for name, path in paths.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
        platform.pickle_backend_by_restoring(
            AttentionBackendEnum[name], functools.partial(restore_backend, name)
        )


def cpu_backend_path(backend: Any, selector_config: Any) -> str:
    """The class that serves a layer on CPUs.

    Raises:
        RelayUnsupportedError: none does; with the reasons.
    """
    check_layer(selector_config, "cpu")
    return backend.get_path()


def cuda_backend_path(backend: Any, selector_config: Any) -> str:
    """The class that serves a layer on NVIDIA GPUs, by the backend that prompts are left to.

    Raises:
        RelayUnsupportedError: none does; with the reasons.
    """
    from vllm.platforms import current_platform

    from vllm_relay.attention_backends.cuda.relay_choice import path_for_layer

    check_layer(selector_config, "cuda")
    capability = current_platform.get_device_capability()
    check_capability((capability.major, capability.minor), selector_config.kv_cache_dtype)
    return path_for_layer(backend.name, selector_config, capability)


def _register_stats() -> None:
    from vllm_relay.vllm_changes import statistics

    statistics.add_field_to_scheduler_stats()


def check_new_config(vllm_config: VllmConfig) -> None:
    """Check a configuration the front end has just built, and set the front end up for it.

    Raises:
        ValueError: an option under ``additional_config["relay"]`` is unknown or bad, the section is
            misspelled, or RELAY is selected for something it cannot serve.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from vllm_relay import wiring
    from vllm_relay.config import (
        ATTENTION_OPTIONS,
        PREFIX_CACHE_OPTIONS,
        SCHEDULER_OPTIONS,
        SECTION,
        RelayConfig,
        misspelled_section,
        options_of,
        options_outside_section,
        scheduler_is_selected,
    )
    from vllm_relay.config.long_contexts import LongContextOptions
    from vllm_relay.long_context.start_checks import check_context_dir, check_contexts
    from vllm_relay.modules.engine.requests import check_schemas
    from vllm_relay.prefix_cache.pins.system_prompts import check_system_prompts

    logger = init_logger("vllm.relay")
    options = RelayConfig.from_vllm_config(vllm_config)
    if options.scheduler:
        select_scheduler(vllm_config)
    elif "scheduler" in options.model_fields_set and scheduler_is_selected(vllm_config):
        raise ValueError(
            f"{SECTION}.scheduler is false and --scheduler-cls is RelayScheduler: give one of the "
            "two"
        )
    backend, scheduler = relay_is_selected(vllm_config), scheduler_is_selected(vllm_config)
    check_system_prompts(vllm_config, options)
    sparse = sparse_is_selected(vllm_config)
    long_context_options = LongContextOptions.model_fields.keys()
    for selected, names, reader, way in (
        (scheduler, SCHEDULER_OPTIONS, "RelayScheduler reads", f"add {SECTION}.scheduler=true"),
        (backend, ATTENTION_OPTIONS, "its backends read", "use --attention-backend relay"),
        (
            sparse,
            long_context_options,
            "RELAY_SPARSE reads",
            "use --attention-backend relay_sparse",
        ),
    ):
        unused = options.model_fields_set & names
        if unused and not selected and (backend or scheduler):
            raise ValueError(
                f"{SECTION}.{min(unused)} is given but only {reader} it: {way}, or leave it away"
            )
    if sparse:
        check_contexts(vllm_config, options)
        check_context_dir(vllm_config, options)
    check_schemas(vllm_config, options)
    if (name := misspelled_section(vllm_config)) is not None:
        message = f"additional_config.{name}: nobody reads this section; did you mean {SECTION}?"
        if backend or scheduler:
            raise ValueError(message)
        logger.warning_once("vllm-relay: %s", message)
    for name in options_outside_section(vllm_config):
        logger.warning_once(
            "vllm-relay: additional_config.%s is not under relay, where relay reads its options; "
            "did you mean %s.%s?",
            name,
            SECTION,
            name,
        )
    if options.page:
        check_page(vllm_config)
    if not (backend or scheduler or options.page):
        if options_of(vllm_config) is not None:
            logger.warning_once(
                "vllm-relay: additional_config.relay is given but has no effect without "
                "--attention-backend relay, additional_config.relay.scheduler or "
                "additional_config.relay.page"
            )
        return
    if backend:
        # vLLM calls the devices of ROCm "cuda" too
        device_type = "rocm" if current_platform.is_rocm() else current_platform.device_type
        check_config(vllm_config, device_type)
        _check_extension()
        if sparse:
            check_sparse_config(vllm_config, device_type, options.prefill)
            if device_type == "cuda":
                _wait_for_each_step(vllm_config)
        if current_platform.is_cpu():
            _check_kernel(vllm_config, options)
            if options.cuda_kernels != "auto":
                raise ValueError(
                    f"{SECTION}.cuda_kernels: given {options.cuda_kernels!r}, kernels of GPUs: "
                    f"leave it out for {device_type} devices"
                )
        elif options.kernel != "auto":
            raise ValueError(
                f"{SECTION}.kernel: given {options.kernel!r}, a CPU kernel: leave it out for "
                f"{device_type} devices"
            )
    if not vllm_config.cache_config.enable_prefix_caching:
        if useless := options.model_fields_set & PREFIX_CACHE_OPTIONS:
            raise ValueError(
                f"{SECTION}.{min(useless)} is given and prefix caching is off: set "
                "--enable-prefix-caching, or leave it out"
            )
        logger.warning_once(
            "vllm-relay: prefix caching is off, so requests share no KV blocks and relay has "
            "nothing to read once for several of them"
        )
    if scheduler or sparse:
        wiring.prepare_new_engines()
    wiring.end_open_requests()
    wiring.serve_endpoints()  # they say why they cannot be used, where they cannot
    try:
        wiring.publish_metrics()
    except Exception:
        logger.warning("vllm-relay: the metrics relay:* are not available", exc_info=True)


def select_scheduler(vllm_config: VllmConfig) -> None:
    """Let RelayScheduler schedule, as ``additional_config.relay.scheduler`` asks.

    Raises:
        ValueError: another scheduler class is given too.
    """
    from vllm_relay.config import SCHEDULER_PATH

    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    if scheduler_cls is not None and not isinstance(scheduler_cls, str):
        scheduler_cls = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    if scheduler_cls not in (None, SCHEDULER_PATH):
        raise ValueError(
            f"additional_config.relay.scheduler is true and --scheduler-cls is {scheduler_cls}: "
            "give one of the two"
        )
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER_PATH


def check_page(vllm_config: VllmConfig) -> None:
    """Refuse the live page where there would be nothing to see.

    Raises:
        ValueError: prefix caching is off, or the scheduler class is not based on vLLM's.
    """
    from vllm_relay.config import SECTION, scheduler_is_selected

    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"{SECTION}.page is true and prefix caching is off: set --enable-prefix-caching, or "
            "leave it out"
        )
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    if scheduler_cls is None or scheduler_is_selected(vllm_config):
        return
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.scheduler import Scheduler

    if isinstance(scheduler_cls, str):
        scheduler_cls = resolve_obj_by_qualname(scheduler_cls)
    if not issubclass(scheduler_cls, Scheduler):
        raise ValueError(
            f"{SECTION}.page is true, and --scheduler-cls {scheduler_cls.__qualname__} is not "
            "based on vLLM's Scheduler, whose KV blocks are shown: leave one of the two out"
        )


def _wait_for_each_step(vllm_config: VllmConfig) -> None:
    """Turns asynchronous scheduling off: every layer waits for the host, which hides nothing of the
    scheduler, and nobody has tried what the host's copy is then."""
    from vllm.logger import init_logger

    if vllm_config.scheduler_config.async_scheduling:
        vllm_config.scheduler_config.async_scheduling = False
        init_logger("vllm.relay").info_once(
            "vllm-relay: asynchronous scheduling is off with RELAY_SPARSE"
        )


def _check_extension() -> None:
    try:
        importlib.import_module("vllm_relay._C")
    except ImportError as error:
        raise ValueError(
            f"vllm-relay: its compiled kernels cannot be loaded: {error}; "
            "`vllm-relay doctor` says what to do"
        ) from error


def _check_kernel(vllm_config: VllmConfig, options: RelayConfig) -> None:
    from vllm_relay.attention_backends.cpu import kernels as cpu

    if vllm_config.model_config is None:
        return
    try:
        cpu.kernel_for(vllm_config.model_config.dtype, options.kernel)
    except ValueError as error:
        raise ValueError(f"additional_config.relay.kernel: {error}") from None
