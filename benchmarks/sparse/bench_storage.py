# SPDX-License-Identifier: Apache-2.0
"""What verifying stored contexts costs: checksums against reading memory, first use against all.

"read" takes the maximum of the same bytes as 64-bit numbers, which is a loop that only reads.
Files are read from the page cache: what a disk adds is the same for all and not measured here.
"""

import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import interleaved, ratio
from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host.host_sequence import HostSequence, SequencePlace
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker_contexts import WorkerContexts, db_options
from vllm_relay.long_context.orders import KeptContext
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import HeadStates, context_id_of
from vllm_relay.sparse.contexts.disk.context_file import ContextFile, write_context
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.checksum import crc32c, kernels
from vllm_relay.sparse.files.section_table import PAGE_BYTES
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex

SIZES_BYTES = (PAGE_BYTES, 1 << 20, 256 << 20)
BAR_GB_PER_S = 5.0
NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE = 131_072, 8, 128  # one layer of Llama-3-8B
VALUES_TAKEN = 100
POOL_BYTES = 64 << 20
READ_BYTES = 1 << 20
NUM_TURNS, TURN_TOKENS = 20, 5_000


def measure_checksums(num_bytes: int, rounds: int) -> Row:
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    numbers = data.view(np.int64)
    names = kernels()
    contenders: dict[str, Callable[[], object]] = {
        name: lambda name=name: crc32c(data, kernel=name) for name in names
    }
    contenders["zlib.crc32"] = lambda: zlib.crc32(data)
    contenders["read"] = numbers.max
    times = interleaved(contenders, rounds)
    return {
        "bytes": num_bytes,
        **{f"{name} GB/s": num_bytes / times[name].median_s / 1e9 for name in contenders},
        "spread": times[names[0]].spread,
        "best over read": ratio(times["read"], times[names[0]]),
        "best over zlib": ratio(times["zlib.crc32"], times[names[0]]),
    }


def random_heads(num_tokens: int) -> Iterator[HeadStates]:
    rng = np.random.default_rng(0)
    for _ in range(NUM_KV_HEADS):
        # bfloat16 numbers of magnitude 2^-1 to 2
        bits = rng.integers(0, 2**16, (2, num_tokens, HEAD_SIZE), dtype=np.uint16) & 0x807F | 0x3F00
        keys, values = (Elements(each, "bfloat16") for each in bits)
        yield HeadStates(keys, values, FlatIndex().build(keys))


def measure_first_use(path: Path, num_tokens: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, num_tokens, VALUES_TAKEN) for _ in range(NUM_KV_HEADS)]

    def take_values(pool: BufferPool | None) -> None:
        with ContextFile.open(path, pool=pool) as context:
            for kv_head, chosen in enumerate(ids):
                context.rows(0, kv_head, "values").take(chosen)

    def use_head() -> None:
        with ContextFile.open(path) as context:
            context.rows(0, 0, "keys").whole()
            context.rows(0, 0, "values").take(ids[0])

    def read_without_verifying() -> None:
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    everything = "open, verify the whole file"
    contenders: dict[str, Callable[[], object]] = {
        "open": lambda: ContextFile.open(path).close(),
        f"open, {VALUES_TAKEN} values of each head": lambda: take_values(None),
        f"open, {VALUES_TAKEN} values of each head, pool": lambda: take_values(
            BufferPool(POOL_BYTES)
        ),
        f"open, all keys and {VALUES_TAKEN} values of one head": use_head,
        everything: lambda: ContextFile.open(path, verify="now").close(),
        "read the whole file, verify nothing": read_without_verifying,
    }
    times = interleaved(contenders, rounds)
    return [
        {
            "what": name,
            "ms": times[name].median_ms,
            "spread": times[name].spread,
            "faster than verifying all": ratio(times[everything], times[name]),
        }
        for name in contenders
    ]


def sequence_of(begin: int, end: int) -> HostSequence:
    """A request that computed the tokens from `begin` on, in one layer."""
    sequence = HostSequence(SequencePlace(begin, end - begin, 0, 0, 0))
    generator = torch.Generator().manual_seed(begin)
    shape = (end - begin, NUM_KV_HEADS, HEAD_SIZE)
    keys, values = torch.randn(2, *shape, generator=generator).bfloat16()
    sequence.layer("layer", keys).write(begin, keys, values)
    return sequence


def keep_turns(folder: Path | None, ends: list[int]) -> tuple[int, list[float]]:
    """Keeps requests each of which reused the one before.

    Returns:
        bytes of the files, or of memory without a folder; and what keeping each took of an engine
        step, while indexes of those before are built.
    """
    fingerprint = ContextFingerprint("random", "", 1, NUM_KV_HEADS, HEAD_SIZE, "bfloat16")
    builders = start_builders(1)
    contexts = WorkerContexts(folder, fingerprint, ["layer"], db_options(RelayConfig()), builders)
    seconds, begin, reused = [], 0, None
    for end in ends:
        sequence, tokens = sequence_of(begin, end), list(range(end))
        kept = KeptContext(context_id_of(np.arange(end)), tokens)
        begin_s = time.perf_counter()
        contexts.keep(kept, sequence, reused)
        seconds.append(time.perf_counter() - begin_s)
        begin, reused = end, contexts.get(kept.context_id)
    builders.shutdown(wait=True)
    reports = [report for report, _ in contexts.reports()]
    assert len(reports) == len(ends) and not any(report.problem for report in reports)
    num_bytes = sum(report.memory_bytes for report in reports)
    if folder is not None:  # without the holes between sections
        num_bytes = sum(each.stat().st_blocks * 512 for each in folder.iterdir())
    contexts.close()
    return num_bytes, seconds


def measure_chat(num_turns: int, turn_tokens: int) -> list[Row]:
    ends = [turn_tokens * (turn + 1) for turn in range(num_turns)]
    rows: list[Row] = []
    for place in ("memory", "folder"):
        with tempfile.TemporaryDirectory(prefix="relay-chat-") as name:
            folders = [Path(name, each) if place == "folder" else None for each in ("chat", "last")]
            chat_bytes, seconds = keep_turns(folders[0], ends)
            last_bytes, _ = keep_turns(folders[1], ends[-1:])
        rows.append(
            {
                "kept in": place,
                "MiB of all turns": chat_bytes / 2**20,
                "MiB of the last alone": last_bytes / 2**20,
                "all over last": chat_bytes / last_bytes,
                "all over last if each stored all of its tokens": sum(ends) / ends[-1],
                "longest keeping in a step, ms": max(seconds) * 1e3,
            }
        )
    return rows


def main() -> None:
    options = argument_parser(__doc__, rounds=9).parse_args()
    result = Result.begin(__file__, __doc__, options)
    sizes = (PAGE_BYTES,) if options.smoke else SIZES_BYTES
    rows = [measure_checksums(num_bytes, options.rounds) for num_bytes in sizes]
    result.add_table("Checksums on one core", rows)
    best = rows[-1][f"{kernels()[0]} GB/s"]
    result.add_goal(
        Goal("storage, checksum of memory", best, BAR_GB_PER_S, rows[-1]["read GB/s"], unit="GB/s")
    )
    num_turns, turn_tokens = (3, 300) if options.smoke else (NUM_TURNS, TURN_TOKENS)
    rows = measure_chat(num_turns, turn_tokens)
    result.add_table(
        f"A chat of {num_turns} turns of {turn_tokens} tokens, all kept; one layer, "
        f"{NUM_KV_HEADS} kv heads",
        rows,
    )
    num_tokens = 256 if options.smoke else NUM_TOKENS
    fingerprint = ContextFingerprint("random", "", 1, NUM_KV_HEADS, HEAD_SIZE, "bfloat16")
    with tempfile.TemporaryDirectory(prefix="relay-storage-") as folder:
        path = Path(folder, "a.relayctx")
        write_context(path, fingerprint, np.arange(num_tokens), random_heads(num_tokens))
        rows = measure_first_use(path, num_tokens, options.rounds)
        result.add_table(
            f"One layer of {num_tokens} tokens, {NUM_KV_HEADS} kv heads, "
            f"{path.stat().st_size / 2**20:.0f} MiB, from the page cache",
            rows,
        )
    result.add_goal(
        Goal(
            f"storage, open and {VALUES_TAKEN} values of each head, over verifying all",
            rows[1]["faster than verifying all"],
            5,
            20,
        )
    )
    result.end(options)


if __name__ == "__main__":
    main()
