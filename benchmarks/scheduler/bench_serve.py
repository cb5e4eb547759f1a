# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` against stock's server: relay attention, RelayScheduler, and both.

Dataset prefix_repetition: 4 prefixes of 3,000 tokens, 64 more and 64 of an answer, 192 prompts, 64
at a time. As all answers are of one length, those 64 end together, and the next 64 come together:
the front end tokenizes them one after the other, and who generates faster brings that about more
often. So both servers also get the same prompts at random times, 0.8 of as many per second as
stock's answered. The four servers are alive together and are asked in turn, so that all meet the
same neighbours; every round has prompts of its own, and the first of all is not counted. All ratios
are medians of those of a round.

The time to the first token is taken apart by what the server counts of each request: in the engine
core from its arrival to its admission (queue), and from there to the end of its prompt (prefill);
the rest of the server's own time to the first token is its front end's (way), which tokenizes, and
what the client waits beyond that is HTTP and the client's own. All are means over the requests of a
round. Stock's server knows no plug-in.
"""

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.support.formatting import Row
from benchmarks.support.model import Model
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.tokenizer import build_tokenizer, vocabulary

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 4, 3000, 64, 64
PROMPTS, CONCURRENCY = 192, 64
MODEL = Model(256, 768, 4, 4, 4, -(-len(vocabulary()) // 64) * 64)
START_S = 300
ATTENTION = ["--attention-backend", "relay"]
SCHEDULER = ["--additional-config", json.dumps({"relay": {"scheduler": True}})]
CONTENDERS = {
    "stock": [],
    "relay attention": ATTENTION,
    "scheduler": SCHEDULER,
    "both": [*ATTENTION, *SCHEDULER],
}
AT_RANDOM = ("stock", "both")
LOAD = 0.8
NO_PLUGIN = {"VLLM_PLUGINS": ""}
# connections that wait for a random time are not closed under a client that uses one again
SERVER_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
COUNTED = {
    "queue ms": "vllm:request_queue_time_seconds",
    "prefill ms": "vllm:request_prefill_time_seconds",
    "decode ms": "vllm:request_decode_time_seconds",
    "server's first token ms": "vllm:time_to_first_token_seconds",
}
SAMPLE = re.compile(r"^([\w:]+)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Workload:
    prefixes: int = PREFIXES
    prefix_tokens: int = PREFIX_TOKENS
    prompts: int = PROMPTS
    concurrency: int = CONCURRENCY
    per_s: float | None = None
    """At random times; None: as soon as one of `concurrency` is answered."""


TINY = Workload(2, 300, 8, 4)


class Server:
    """`vllm serve` in a process of its own; use as a context manager."""

    def __init__(
        self, model: str, options: list[str], environment: dict[str, str], log: Path
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model, self._log = model, log
        arguments = ["serve", model, "--host", "127.0.0.1", "--port", str(self._port)]
        arguments += ["--load-format", "dummy", "--enforce-eager", "--max-model-len", "4096"]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments, *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SERVER_ENVIRONMENT, **environment},
                start_new_session=True,  # its processes can then be ended all together
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> None:
        """Until it answers."""
        until_s = time.monotonic() + START_S
        while True:
            try:
                self._page("/health")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"a server failed:\n{self._log.read_text()[-4000:]}") from None
                time.sleep(0.5)

    def _page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}") as answer:
            return answer.read().decode()

    def _samples(self) -> dict[str, float]:
        samples: dict[str, float] = {}
        for name, value in SAMPLE.findall(self._page("/metrics")):
            samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def bench(self, workload: Workload, seed: int, folder: Path) -> Row:
        """One run of `vllm bench serve`."""
        found, before = folder / "found.json", self._samples()
        options: dict[str, Any] = {
            "base-url": f"http://127.0.0.1:{self._port}",
            "model": self._model,
            "dataset-name": "prefix_repetition",
            "prefix-repetition-num-prefixes": workload.prefixes,
            "prefix-repetition-prefix-len": workload.prefix_tokens,
            "prefix-repetition-suffix-len": OWN_TOKENS,
            "prefix-repetition-output-len": OUTPUT_TOKENS,
            "num-prompts": workload.prompts,
            "max-concurrency": workload.concurrency if workload.per_s is None else workload.prompts,
            "request-rate": workload.per_s or "inf",
            "seed": seed,
            "result-dir": folder,
            "result-filename": found.name,
        }
        command = ["bench", "serve", "--save-result", "--save-detailed"]
        command += ["--ignore-eos", "--disable-tqdm"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *command],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout}{done.stderr}")
        result, after = json.loads(found.read_text()), self._samples()
        if result["completed"] != workload.prompts:
            errors = "\n".join({each for each in result["errors"] if each})
            raise SystemExit(f"{workload.prompts - result['completed']} requests failed: {errors}")

        def increase(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        counted = {
            shown: 1e3 * increase(f"{name}_sum") / increase(f"{name}_count")
            for shown, name in COUNTED.items()
        }
        return {
            "output tokens per s": result["output_throughput"],
            "requests per s": result["request_throughput"],
            "first token mean ms": result["mean_ttft_ms"],
            "first token p50 ms": result["median_ttft_ms"],
            "first token p99 ms": result["p99_ttft_ms"],
            "between tokens mean ms": result["mean_itl_ms"],
            "between tokens p99 ms": result["p99_itl_ms"],
            **counted,
            "way ms": counted["server's first token ms"]
            - counted["queue ms"]
            - counted["prefill ms"],
            "before ms": result["mean_ttft_ms"] - counted["server's first token ms"],
            "hit rate": increase("vllm:prefix_cache_hits_total")
            / increase("vllm:prefix_cache_queries_total"),
            "planning ms": 1e3 * increase("relay:planning_seconds_total"),
            "scheduling ms": 1e3 * increase("relay:scheduling_seconds_total"),
        }


def medians(runs: dict[str, list[Row]]) -> list[Row]:
    """Over the rounds."""
    return [
        {"server": name, **{each: statistics.median(row[each] for row in rows) for each in rows[0]}}
        for name, rows in runs.items()
    ]


def over_stock(runs: dict[str, list[Row]], name: str, column: str) -> float:
    """The median over the rounds of a contender's by stock's."""
    pairs = zip(runs[name], runs["stock"], strict=True)
    return statistics.median(own[column] / stock[column] for own, stock in pairs)


def main() -> None:
    options = argument_parser(__doc__, rounds=10).parse_args()
    result = Result.begin(__file__, __doc__, options)
    workload, rounds, contenders = Workload(), options.rounds, CONTENDERS
    if options.smoke:
        workload, rounds = TINY, 1
        contenders = {name: CONTENDERS[name] for name in ("stock", "both")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
        model = MODEL.save(folder)
        build_tokenizer(4096).save_pretrained(folder)
        servers = {
            name: stack.enter_context(
                Server(model, given, NO_PLUGIN if name == "stock" else {}, folder / f"{index}.log")
            )
            for index, (name, given) in enumerate(contenders.items())
        }
        for server in servers.values():
            server.wait()
            if not options.smoke:
                server.bench(TINY, 0, folder)
        runs: dict[str, list[Row]] = {name: [] for name in servers}
        at_random: dict[str, list[Row]] = {name: [] for name in AT_RANDOM}
        for index in range(rounds):
            for name in list(servers)[:: -1 if index % 2 else 1]:
                row = servers[name].bench(workload, 1 + index, folder)
                runs[name].append(row)
                first_token_ms = row["first token mean ms"]
                print(f"round {index + 1}, {name}: {first_token_ms:.0f} ms to the first token",
                      file=sys.stderr, flush=True)  # fmt: skip
            per_s = LOAD * runs["stock"][-1]["requests per s"]
            arriving = replace(workload, per_s=per_s)
            for name in AT_RANDOM[:: -1 if index % 2 else 1]:
                at_random[name].append(servers[name].bench(arriving, 1 + index, folder))
    what = f"{workload.prompts} prompts, {workload.concurrency} at a time"
    result.add_table(f"{what}: medians of {rounds} rounds", medians(runs))
    columns = [
        "output tokens per s", "first token mean ms", "first token p50 ms", "first token p99 ms",
        "between tokens mean ms", "queue ms", "prefill ms", "way ms", "before ms",
    ]  # fmt: skip
    result.add_table(
        "By stock's of the same round",
        [
            {"server": name, **{column: over_stock(runs, name, column) for column in columns}}
            for name in runs
            if name != "stock"
        ],
    )
    result.add_table(
        "Every round: mean time to the first token by stock's",
        [
            {"round": index + 1,
             **{name: runs[name][index]["first token mean ms"]
                / runs["stock"][index]["first token mean ms"]
                for name in runs if name != "stock"}}
            for index in range(rounds)
        ],
    )  # fmt: skip
    result.add_table("At random times: medians", medians(at_random))
    result.add_table(
        "At random times, by stock's of the same round",
        [{"server": "both", **{each: over_stock(at_random, "both", each) for each in columns}}],
    )
    faster = over_stock(runs, "both", "output tokens per s")
    result.add_goal(Goal("served, tokens per second over stock", faster, 1.0))
    sooner = 1 / over_stock(runs, "both", "first token mean ms")
    result.add_goal(Goal("served, time to first token, stock's over relay's", sooner, 1.0))
    sooner = 1 / over_stock(at_random, "both", "first token mean ms")
    what = "served at random times, time to first token, stock's over relay's"
    result.add_goal(Goal(what, sooner, 1.0))
    sooner = 1 / over_stock(runs, "both", "between tokens mean ms")
    result.add_goal(Goal("served, time between tokens, stock's over relay's", sooner, 1.0))
    result.end(options)


if __name__ == "__main__":
    main()
