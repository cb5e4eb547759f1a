# SPDX-License-Identifier: Apache-2.0
"""Functions of Triton's language that look at the types of their operands once.

What takes the interpreter longest is what `a + b` means for two types: promotions, the shape to
broadcast to, which instruction it is. That depends on types and constants alone: the first call
with some of them records what it asks the builder for, and later ones ask for the same. A call that
raises records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import (
    InterpreterBuilder,
    TensorHandle,
    interpreter_builder,
    interpreter_semantic,
)

OF_A_PROGRAM = ("create_get_program_id", "create_get_num_programs")
CONSTANTS = {bool, int, float, str, slice, type(None), tl.dtype, tl.pointer_type, tl.block_type}
Step = tuple[str, list[int]]
"""What the builder is asked for, and the slots of what it is given."""


class _Recorder:
    """Takes the builder's place during a call.

    Values have slots: those of the operands, then constants and results as they occur. A result is
    a constant if it depends on no operand, and is not computed again."""

    def __init__(self, operands: Sequence[TensorHandle]) -> None:
        self.values: list[Any] = list(operands)
        self.steps: dict[int, Step] = {}
        self.is_repeatable = True
        self._slots = {id(operand): slot for slot, operand in enumerate(operands)}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(interpreter_builder, name)
        if not callable(attribute):
            return attribute

        def instruct(*arguments: Any, **keywords: Any) -> Any:
            result = attribute(*arguments, **keywords)
            if keywords or any(map(_holds_handles, arguments)):
                self.is_repeatable = False
            elif name in OF_A_PROGRAM or any(id(each) in self._slots for each in arguments):
                slots = [self.slot(each) for each in arguments]
                if isinstance(result, TensorHandle):
                    self._slots[id(result)] = len(self.values)
                elif result is not None:
                    self.is_repeatable = False
                self.steps[len(self.values)] = name, slots
                self.values.append(result)
            return result

        return instruct

    def slot(self, value: Any) -> int:
        if id(value) not in self._slots:
            self.values.append(value)
            return len(self.values) - 1
        return self._slots[id(value)]


def _holds_handles(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(x, TensorHandle) for x in value)


def _repetition(arguments: Sequence[Any], recorder: _Recorder, result: Any) -> Callable[..., Any]:
    """A function of the arguments, which does what was recorded."""
    slot = None if result is None else recorder.slot(result.handle)
    parameters = [f"argument{index}" for index in range(len(arguments))]
    operands = [
        parameter
        for parameter, argument in zip(parameters, arguments, strict=True)
        if type(argument) is tl.tensor
    ]
    lines = [f"value{slot} = {operand}.handle" for slot, operand in enumerate(operands)]
    for target, (name, slots) in _without_broadcasts(recorder, slot).items():
        values = ", ".join(f"value{each}" for each in slots)
        lines.append(f"value{target} = {name}({values})")
    lines.append("return" if slot is None else f"return tensor(value{slot}, type)")
    namespace: dict[str, Any] = {"tensor": tl.tensor, "type": getattr(result, "type", None)}
    namespace |= {f"value{slot}": value for slot, value in enumerate(recorder.values)}
    for name, _ in recorder.steps.values():
        namespace[name] = getattr(interpreter_builder, name)
    exec(f"def repeat({', '.join(parameters)}):\n  " + "\n  ".join(lines), namespace)
    repeat: Callable[..., Any] = namespace["repeat"]
    return repeat


def _without_broadcasts(recorder: _Recorder, result: int | None) -> dict[int, Step]:
    """The steps, without the broadcasts that numpy makes by itself."""
    steps: dict[int, Step] = {}
    sources = {}
    for target, (name, slots) in recorder.steps.items():
        if name == "create_broadcast":
            sources[target] = slots[0]
        elif name == "create_splat":
            sources[target] = slots[1]
        elif len(slots) == 2 and _is_by_element(name):
            small = [sources.get(slot, slot) for slot in slots]
            shapes = (recorder.values[slot].data.shape for slot in small)
            if np.broadcast_shapes(*shapes) == recorder.values[target].data.shape:
                slots = small
        steps[target] = name, slots
    used = {result, *(slot for _, slots in steps.values() for slot in slots)}
    return {slot: step for slot, step in steps.items() if slot in used or slot not in sources}


def _is_by_element(name: str) -> bool:
    function = getattr(InterpreterBuilder, name)
    return name == "create_addptr" or "binary_op" in function.__code__.co_names


def _key(argument: Any) -> Any:
    """What a recording depends on: of a tensor the type, of others the value; None if unknown."""
    kind = type(argument)
    if kind is tl.tensor:
        return argument.type.name
    if kind in CONSTANTS:
        return repr(argument)
    if kind is tl.constexpr and type(argument.value) in CONSTANTS:
        return kind, repr(argument.value)
    if kind is tuple and CONSTANTS.issuperset(map(type, argument)):
        return repr(argument)
    if kind is tl.tuple and {tl.constexpr}.issuperset(map(type, argument)):
        return kind, *map(_key, argument)
    return None


def recorded(member: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin of the language as kernels call it in the interpreter."""
    repetitions: dict[Any, Callable[..., Any] | None] = {}

    def record(key: Any, positional: Sequence[Any], keywords: dict[str, Any]) -> Any:
        # handles of their own: the same may be given twice
        arguments = [
            tl.tensor(TensorHandle(each.handle.data, each.handle.dtype), each.type)
            if type(each) is tl.tensor
            else each
            for each in (*positional, *keywords.values())
        ]
        recorder = _Recorder([each.handle for each in arguments if type(each) is tl.tensor])
        named = dict(zip(keywords, arguments[len(positional) :], strict=True))
        interpreter_semantic.builder = recorder
        try:
            result = member(*arguments[: len(positional)], **named, _semantic=interpreter_semantic)
        finally:
            interpreter_semantic.builder = interpreter_builder
        is_repeatable = recorder.is_repeatable and isinstance(result, (tl.tensor, type(None)))
        repetitions[key] = _repetition(arguments, recorder, result) if is_repeatable else None
        return result

    def call(*positional: Any, _semantic: Any = None, **keywords: Any) -> Any:
        # not for a part of a call that is being recorded
        if interpreter_semantic.builder is interpreter_builder:
            arguments = (*positional, *keywords.values())
            key = (tuple(keywords), *map(_key, arguments))
            if key in repetitions:
                if (repeat := repetitions[key]) is not None:
                    return repeat(*arguments)
            elif None not in key:
                return record(key, positional, keywords)
        return member(*positional, **keywords, _semantic=interpreter_semantic)

    return call
