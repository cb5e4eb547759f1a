# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own whose decode steps can be timed, one round at a time."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOG_TAIL_LINES = 30


@dataclass(frozen=True)
class Model:
    """A Llama of this geometry, with random weights."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_heads: int = 32
    num_kv_heads: int = 32
    num_layers: int = 4
    vocab_size: int = 32000

    def save(self, folder: Path) -> str:
        """Writes what vLLM needs to know about it and returns the folder's name."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


@dataclass(frozen=True)
class EngineSettings:
    model_folder: str
    attention_backend: str
    cores: list[int]
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_cache_gib: int


class StepEngine:
    """A started engine."""

    def __init__(self, settings: EngineSettings, log_path: Path) -> None:
        self.log_path = log_path
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, settings, str(log_path)))
        self._process.start()
        child.close()

    def wait(self) -> list[float]:
        """What the last order led to: nothing, or the seconds of each decode step.

        Raises:
            SystemExit: the engine failed; the message ends with its log.
        """
        try:
            failure, value = self._connection.recv()
        except EOFError:
            failure, value = "its process ended", []
        if failure:
            tail = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise SystemExit("\n".join([f"an engine failed: {failure}", *tail]))
        return value

    def start_decoding(self, prompts: list[list[int]], steps: int) -> None:
        """Orders `steps` decode steps in which every prompt takes part."""
        self._connection.send((prompts, steps))

    def move_to(self, cores: list[int]) -> None:
        """Lets all threads of the engine run on these cores only."""
        process = psutil.Process(self._process.pid)
        for each in [process, *process.children(recursive=True)]:
            for thread in each.threads():
                os.sched_setaffinity(thread.id, cores)

    def stop(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(20)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()


def _serve(connection, settings: EngineSettings, log_path: str) -> None:
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings.cores))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    llm = None
    try:
        from vllm import LLM

        llm = LLM(
            settings.model_folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            attention_backend=settings.attention_backend,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            enable_prefix_caching=True,
            enforce_eager=True,
            seed=0,
        )
        connection.send(("", []))
        rounds = 0
        while (order := connection.recv()) is not None:
            rounds += 1
            connection.send(("", _decode_steps_s(llm.llm_engine, f"round-{rounds}", *order)))
    except Exception as error:
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {error}", []))
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _decode_steps_s(engine, name: str, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds between the arrivals of the results of steps that decoded all prompts."""
    from vllm import SamplingParams

    # requests start one after the other: the first ones are further when the last one joins
    sampling = SamplingParams(
        temperature=0, max_tokens=steps + 8, ignore_eos=True, detokenize=False
    )
    names = [f"{name}-{index}" for index in range(len(prompts))]
    for request, prompt in zip(names, prompts, strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
    arrivals_s: list[float] = []
    while engine.has_unfinished_requests() and len(arrivals_s) <= steps:
        outputs = engine.step()
        if len(outputs) == len(prompts):
            arrivals_s.append(time.perf_counter())
        elif arrivals_s:
            break
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return [after - before for before, after in zip(arrivals_s, arrivals_s[1:], strict=False)]
