# SPDX-License-Identifier: Apache-2.0
"""CPU tensors that stand for those of a GPU, and copies between them and the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from vllm_relay.long_context.host.device_copies import Pending

WAITING = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
)
"""Functions for which a host has to wait for a GPU."""


class DeviceTensor(torch.Tensor):
    """Lies on the fake device."""


class DelayedCopies:
    """What is copied to the host is read when somebody waits for it, as if the copy took that long:
    whoever writes to it before spoils it.

    Args:
        tensor_cls: of the device's tensors.
    """

    def __init__(self, device: torch.device, tensor_cls: type[torch.Tensor] = torch.Tensor) -> None:
        self.tensor_cls = tensor_cls

    def to_host(self, tensor: torch.Tensor) -> Pending:
        assert isinstance(tensor, self.tensor_cls) and tensor.is_contiguous()
        return _Delayed(tensor)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        assert type(tensor) is torch.Tensor
        return tensor.clone().as_subclass(self.tensor_cls)


class _Delayed:
    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.host: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.host is None:
            self.host = on_host(self.source).clone()
        return self.host


class DeviceRules(TorchFunctionMode):
    """Inside, tensors that are made with `device=` lie on the fake device, and nothing mixes those
    with tensors of the host or waits for them. Kernels may do as they please."""

    def __init__(self) -> None:
        super().__init__()
        self.launching = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_allowed = func is torch.Tensor.as_subclass or kwargs.get("non_blocking")
        if self.launching or is_allowed:
            return func(*args, **kwargs)
        tensors = [each for each in _flat([args, kwargs]) if isinstance(each, torch.Tensor)]
        devices = [each for each in tensors if isinstance(each, DeviceTensor)]
        if devices:
            assert func.__name__ not in WAITING, f"{func.__name__} waits for the device"
            # a number may come from the host
            hosts = [each for each in tensors if not isinstance(each, DeviceTensor)]
            assert all(each.dim() == 0 for each in hosts), f"{func} mixes host and device"
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None and isinstance(result, torch.Tensor):
            return result.as_subclass(DeviceTensor)
        return result


@contextmanager
def fake_device() -> Iterator[DeviceRules]:
    """DeviceRules, and launches that are exempt from them."""
    rules, call = DeviceRules(), interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        rules.launching += 1
        try:
            for each in _flat([args, kwargs]):
                assert not isinstance(each, torch.Tensor) or isinstance(each, DeviceTensor), (
                    f"a kernel is given a tensor of the host, {tuple(each.shape)}"
                )
            call(self, *map(on_host, args), **{key: on_host(each) for key, each in kwargs.items()})
        finally:
            rules.launching -= 1

    interpreter.GridExecutor.__call__ = launch
    try:
        with rules:
            yield rules
    finally:
        interpreter.GridExecutor.__call__ = call


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(DeviceTensor)


def on_host(each: Any) -> Any:
    """For the tests: the same memory as a tensor of the host."""
    return each.as_subclass(torch.Tensor) if isinstance(each, DeviceTensor) else each


def _flat(each: Any) -> Iterator[Any]:
    if isinstance(each, dict):
        each = list(each.values())
    if isinstance(each, (list, tuple)):
        for item in each:
            yield from _flat(item)
    else:
        yield each
