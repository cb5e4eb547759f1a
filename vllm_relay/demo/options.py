# SPDX-License-Identifier: Apache-2.0
"""What every demo is given, and how it begins and ends."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from vllm_relay.arguments import CommandLineError, check_writable
from vllm_relay.demo.engine_process import EngineError

T = TypeVar("T")


def native_dtype() -> str:
    """bfloat16 where the device of the engines multiplies it, and else float32.

    CPUs that do not turn each number into a float32 first, which takes longer than reading it.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    from vllm_relay import _C

    features = _C.cpu_features()
    multiplies = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "neon_bf16"))
    return "bfloat16" if multiplies else "float32"


@dataclass(frozen=True)
class DemoOptions:
    """What every demo is given.

    Attributes:
        dtype: of the weights, the activations and the KV cache.
        seed: the same seed gives the same model and workload.
        keep: where the recall model and the logs are kept; a temporary directory if None.
        json_path: where all numbers are written as JSON.
        console: where to print; the standard output if not given.
    """

    dtype: str = "bfloat16"
    seed: int = 0
    keep: Path | None = None
    json_path: Path | None = None
    console: Console = field(default_factory=Console)

    def run(self, demo: Callable[[], T]) -> T | None:
        """What `demo` returns; None, with the reason printed, if an engine or a file fails.

        Raises:
            CommandLineError: a setting is refused.
        """
        try:
            check_writable("--json", self.json_path)
            return demo()
        except EngineError as error:
            self._print_problem(f"{error}\nvllm-relay doctor says what may be missing here.")
        except OSError as error:
            self._print_problem(str(error))
        except ValueError as error:
            raise CommandLineError(str(error)) from error
        return None

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """`keep`, made if it is missing, or a temporary directory."""
        if self.keep is None:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
        else:
            self.keep.mkdir(parents=True, exist_ok=True)
            yield self.keep

    def write_json(self, numbers: dict[str, Any]) -> None:
        if self.json_path is not None:
            self.json_path.write_text(json.dumps(numbers, indent=2) + "\n")

    def conclude(self, problems: Sequence[str], success: str | None, *, next_step: str) -> int:
        """Print the problems, or `success` and what to do next if there are none.

        Returns:
            The exit status.
        """
        for problem in problems:
            self._print_problem(problem)
        if problems:
            return 1
        if success is not None:
            self.console.print(success, style="green", highlight=False)
        self.console.print(f"Next: {next_step}", markup=False, highlight=False, soft_wrap=True)
        return 0

    def _print_problem(self, problem: str) -> None:
        self.console.print(problem, style="red", markup=False, highlight=False)
