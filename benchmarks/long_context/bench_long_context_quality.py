# SPDX-License-Identifier: Apache-2.0
"""Questions to long documents: how many are answered right by RELAY and by RELAY_SPARSE.

The demo's recall model reads a document and continues the words that a question ends in; the answer
lies anywhere in the document and there is one right one. An answer is right if all its tokens are.
RELAY keeps the document on the device and reads all of it for every token; RELAY_SPARSE keeps its
ends there and reads of the rest, in host memory, what an index finds. Both have an engine in a
process of its own, one after the other, and cache prefixes. KV blocks are those that a request
holds while it is answered. Counts, not times.
"""

import os
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.support import machine
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.long_contexts.engine import LongAnswer, LongEngine
from vllm_relay.demo.long_contexts.workload import chronicle_workload
from vllm_relay.demo.recall_model import MAX_POSITIONS, build_recall_model
from vllm_relay.demo.requests import Request, tokenize

DENSE, SPARSE = "RELAY", "RELAY_SPARSE"
DOCUMENTS_TOKENS = (4096, 8192, 16_384, 32_000)


def answers(engine: LongEngine, requests: list[Request], output_tokens: int) -> list[LongAnswer]:
    """One request after the other."""
    return [engine.answer(request.prompt_token_ids, output_tokens) for request in requests]


def compared(
    requests: list[Request], dense: list[LongAnswer], sparse: list[LongAnswer]
) -> dict[str, int]:
    """Counts of questions, for a row."""
    triples = list(zip(requests, dense, sparse, strict=True))
    right = [request.expected_token_ids for request in requests]
    return {
        "questions": len(requests),
        f"{DENSE} right": sum(a.token_ids == r for a, r in zip(dense, right, strict=True)),
        f"{SPARSE} right": sum(a.token_ids == r for a, r in zip(sparse, right, strict=True)),
        "differ": sum(a.token_ids != b.token_ids for _, a, b in triples),
        f"wrong with {SPARSE} only": sum(
            a.token_ids == request.expected_token_ids != b.token_ids for request, a, b in triples
        ),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--documents", type=int, nargs="+", default=DOCUMENTS_TOKENS,
                        metavar="TOKENS", help="lengths (%(default)s)")  # fmt: skip
    parser.add_argument("--questions", type=int, default=200, help="each (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=8, help="an answer (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.documents, options.questions = [4096], 3
    cores = machine.available_cores()[: options.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))

    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = str(build_recall_model(Path(folder, "model"), dtype=options.dtype))
        tokenizer = AutoTokenizer.from_pretrained(model)
        requests = {
            tokens: tokenize(
                tokenizer,
                [
                    chronicle_workload(
                        document_tokens=tokens,
                        num_questions=options.questions,
                        output_tokens=options.output_tokens,
                    )
                ],
            )
            for tokens in options.documents
        }
        found: dict[str, dict[int, list[LongAnswer]]] = {}
        for backend in (DENSE, SPARSE):
            settings = EngineSettings(model, backend, options.dtype, MAX_POSITIONS, max_num_seqs=1)
            found[backend] = {}
            with LongEngine(backend, settings, Path(folder, f"{backend}.log")) as engine:
                engine.wait()
                for tokens, asked in requests.items():
                    print(f"# {backend} reads a document of {tokens:,} tokens", flush=True)
                    found[backend][tokens] = answers(engine, asked, options.output_tokens)

    rows: list[Row] = []
    for tokens, asked in requests.items():
        dense, sparse = found[DENSE][tokens], found[SPARSE][tokens]
        counts = compared(asked, dense, sparse)
        rows.append(
            {
                "document tokens": tokens,
                **counts,
                f"{DENSE} KV blocks": max(each.decode_kv_blocks for each in dense),
                f"{SPARSE} KV blocks": max(each.decode_kv_blocks for each in sparse),
            }
        )
        name = f"{options.dtype}, document of {tokens:,} tokens: questions that "
        for what, count in [
            (f"{DENSE} answers wrong", counts["questions"] - counts[f"{DENSE} right"]),
            (f"{SPARSE} answers otherwise", counts["differ"]),
        ]:
            result.add_goal(Goal(name + what, count, 0, lower_is_better=True, unit=""))
    result.add_table(f"Answers of {options.output_tokens} tokens in {options.dtype}", rows)
    result.end(options)


if __name__ == "__main__":
    main()
