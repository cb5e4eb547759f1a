# SPDX-License-Identifier: Apache-2.0
"""A two-layer Llama wired by hand to recall: after `a b` it emits what followed the earlier `a b`.

No training and no download: the weights are written down in closed form, so the right answer to any
prompt is known, and a wrong key, value or position read by an attention kernel shows up as a wrong
token.  Everything about the model is a plain `LlamaForCausalLM`.

The residual stream is `[1, CURRENT, PREVIOUS, SECOND_PREVIOUS, OUTPUT]`: a constant and four slots
of `CODE_SIZE` dimensions that hold token codes (vectors of +-1 with low mutual correlation).

    embedding   CURRENT         = code of the token here
    layer 0     PREVIOUS        = code of the token one back     (attention by position only)
                SECOND_PREVIOUS = code of the token two back
    layer 1     OUTPUT          = CURRENT of the position j with  (attention by content only)
                                  [PREVIOUS, SECOND_PREVIOUS](j) = [CURRENT, PREVIOUS](here)
    lm_head     logit of token t = OUTPUT . code of t

Attention by position: rotary embedding turns pair i of a query at m and of a key at n by the angles
m f_i and n f_i.  With a constant key (g, 0) and a query (g, 0) turned back by `offset` positions
the score is g^2 sum_i cos(f_i (m - offset - n)), whose peak is at n = m - offset.

Attention by content: pairs so slow that they turn by less than 0.04 rad over 32K positions leave
q . k = PREVIOUS_j . CURRENT + SECOND_PREVIOUS_j . PREVIOUS, which is 2 CODE_SIZE at a match and at
most CODE_SIZE + MAX_CODE_CORRELATION elsewhere.

In both, the gain makes the peak win over all other positions together: exp(-gain margin) times
`max_position_embeddings` is exp(-LEAKAGE_NATS).  All codes have the same norm, so every RMSNorm
divides by a constant, and its weight multiplies by the same constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

from vllm_relay.demo.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, build_tokenizer, vocabulary

NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_SIZE = 128
HIDDEN_SIZE = 160
INTERMEDIATE_SIZE = 32
ROPE_THETA = 1e12
CODE_SIZE = 32
MAX_CODES = 2048
MAX_CODE_CORRELATION = 8
MAX_POSITIONS = 32768
LEAKAGE_NATS = 9.0

NUM_FAST_PAIRS = 12
NUM_SLOW_PAIRS = CODE_SIZE
CONSTANT = 0
CURRENT, PREVIOUS, SECOND_PREVIOUS, OUTPUT = (
    slice(1 + slot * CODE_SIZE, 1 + (slot + 1) * CODE_SIZE) for slot in range(4)
)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RecallModelSpec:
    """What can be chosen about a recall model; `seed` decides which token gets which code."""

    vocab_size: int
    max_position_embeddings: int = MAX_POSITIONS
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= MAX_CODES:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, expected 1 to {MAX_CODES}: "
                f"there are {MAX_CODES} token codes"
            )
        if not 4 <= self.max_position_embeddings <= MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings is {self.max_position_embeddings}, expected 4 to "
                f"{MAX_POSITIONS}: further away the slow rotary pairs turn too much"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(_DTYPES)}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")


def build_recall_model(
    directory: Path | str,
    *,
    max_position_embeddings: int = MAX_POSITIONS,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """Write the recall model and its tokenizer as a Hugging Face folder and return the folder.

    Args:
        directory: made if missing; files of an earlier build in it are replaced.
        max_position_embeddings: longest sequence, 4 to 32768 tokens.
        dtype: "float32", "float16" or "bfloat16", of the weights and in the configuration.
        seed: decides which token gets which code.

    Raises:
        ValueError: an argument is out of its range.
    """
    spec = RecallModelSpec(
        vocab_size=len(vocabulary()),
        max_position_embeddings=max_position_embeddings,
        dtype=dtype,
        seed=seed,
    )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(_DTYPES[dtype]) for name, w in recall_weights(spec).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    recall_config(spec).save_pretrained(directory)
    GenerationConfig(bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID).save_pretrained(
        directory
    )
    build_tokenizer(spec.max_position_embeddings).save_pretrained(directory)
    return directory


def recall_config(spec: RecallModelSpec) -> LlamaConfig:
    """The configuration that `recall_weights` belongs to."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def recall_weights(spec: RecallModelSpec) -> dict[str, torch.Tensor]:
    """All weights of the model, float32, under the names of `LlamaForCausalLM`."""
    codes = torch.from_numpy(token_codes(spec.vocab_size, spec.seed)).float()
    embedding = torch.zeros(spec.vocab_size, HIDDEN_SIZE)
    embedding[:, CONSTANT] = 1
    embedding[:, CURRENT] = codes
    output = torch.zeros(spec.vocab_size, HIDDEN_SIZE)
    output[:, OUTPUT] = codes
    return {
        "model.embed_tokens.weight": embedding,
        **_layer_weights(0, 1, _previous_token_heads(spec.max_position_embeddings)),
        **_layer_weights(1, 3, _matching_heads(spec.max_position_embeddings)),
        "model.norm.weight": _restoring_norm(num_filled_slots=4),
        "lm_head.weight": output,
    }


def token_codes(vocab_size: int, seed: int = 0) -> np.ndarray:
    """Codes of +-1 whose pairwise dot products are at most `MAX_CODE_CORRELATION`.

    Code (u, v, c) is (-1) ** (<u, x> + <v, x^3> + c) over all x in GF(32), with <,> the dot product
    of bits.  x^3 is an almost bent function of GF(2^5): the product of two such codes sums to 0 or
    +-8, or to -32 for a code and its complement.

    Returns:
        int8 [vocab_size, CODE_SIZE]
    """
    x = np.arange(CODE_SIZE)
    cube = np.array([_multiply_gf32(_multiply_gf32(i, i), i) for i in range(CODE_SIZE)])
    index = np.random.default_rng(seed).permutation(MAX_CODES)[:vocab_size, None]
    u, v, complement = index % 32, index // 32 % 32, index // 1024
    sign_bit = _parity(u & x) ^ _parity(v & cube) ^ complement
    return (1 - 2 * sign_bit).astype(np.int8)


def _multiply_gf32(a: int, b: int) -> int:
    """The product of two elements of GF(2^5), reduced by x^5 + x^2 + 1."""
    product = 0
    for bit in range(5):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(8, 4, -1):
        if product >> bit & 1:
            product ^= 0b100101 << (bit - 5)
    return product


def _parity(bits: np.ndarray) -> np.ndarray:
    """1 where a number of 5 bits has an odd number of ones."""
    return np.bitwise_xor.reduce([bits >> shift & 1 for shift in range(5)])


def _previous_token_heads(max_positions: int) -> dict[str, torch.Tensor]:
    """Layer 0: the first query head of KV head 0 looks one token back, that of KV head 1 two."""
    frequencies = ROPE_THETA ** (
        -torch.arange(NUM_FAST_PAIRS, dtype=torch.float64) / (HEAD_SIZE // 2)
    )
    gain = math.sqrt(_positional_gain(frequencies, max_positions) * math.sqrt(HEAD_SIZE))
    q, k, v, o = _empty_heads()
    for kv_head, (offset, destination) in enumerate([(1, PREVIOUS), (2, SECOND_PREVIOUS)]):
        head = kv_head * (NUM_HEADS // NUM_KV_HEADS)
        q[head, :NUM_FAST_PAIRS, CONSTANT] = gain * torch.cos(frequencies * offset)
        sine = slice(HEAD_SIZE // 2, HEAD_SIZE // 2 + NUM_FAST_PAIRS)
        q[head, sine, CONSTANT] = -gain * torch.sin(frequencies * offset)
        k[kv_head, :NUM_FAST_PAIRS, CONSTANT] = gain
        v[kv_head, :CODE_SIZE, CURRENT] = torch.eye(CODE_SIZE)
        o[destination, head, :CODE_SIZE] = torch.eye(CODE_SIZE)
    return _flat_heads(q, k, v, o)


def _positional_gain(frequencies: torch.Tensor, max_positions: int) -> float:
    """The factor on sum_i cos(f_i distance) that lets distance 0 win over all others together."""
    distance = torch.arange(1, max_positions + 1, dtype=torch.float64)[:, None]
    margin = len(frequencies) - (frequencies * distance).cos().sum(1).max().item()
    return (math.log(max_positions) + LEAKAGE_NATS) / margin


def _matching_heads(max_positions: int) -> dict[str, torch.Tensor]:
    """Layer 1: every query head finds the matching pair and copies its quarter of the code."""
    margin = CODE_SIZE - MAX_CODE_CORRELATION
    gain = math.sqrt((math.log(max_positions) + LEAKAGE_NATS) / margin * math.sqrt(HEAD_SIZE))
    first = slice(HEAD_SIZE // 2 - NUM_SLOW_PAIRS, HEAD_SIZE // 2)
    second = slice(HEAD_SIZE - NUM_SLOW_PAIRS, HEAD_SIZE)
    code = torch.eye(CODE_SIZE)
    q, k, v, o = _empty_heads()
    q[:, first, CURRENT] = k[:, first, PREVIOUS] = gain * code
    q[:, second, PREVIOUS] = k[:, second, SECOND_PREVIOUS] = gain * code
    v[:, :CODE_SIZE, CURRENT] = code
    quarter = CODE_SIZE // NUM_HEADS
    for head in range(NUM_HEADS):
        dims = slice(head * quarter, (head + 1) * quarter)
        o[OUTPUT, head, :CODE_SIZE][dims] = code[dims]
    return _flat_heads(q, k, v, o)


def _empty_heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zero q [heads, head, hidden], k and v [kv_heads, head, hidden], o [hidden, heads, head]."""
    return (
        torch.zeros(NUM_HEADS, HEAD_SIZE, HIDDEN_SIZE),
        torch.zeros(NUM_KV_HEADS, HEAD_SIZE, HIDDEN_SIZE),
        torch.zeros(NUM_KV_HEADS, HEAD_SIZE, HIDDEN_SIZE),
        torch.zeros(HIDDEN_SIZE, NUM_HEADS, HEAD_SIZE),
    )


def _flat_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The projections as matrices, under their names in an attention layer."""
    return {
        "q_proj": q.flatten(0, 1),
        "k_proj": k.flatten(0, 1),
        "v_proj": v.flatten(0, 1),
        "o_proj": o.flatten(1, 2),
    }


def _layer_weights(
    layer: int, num_filled_slots: int, attention: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """One decoder layer: its attention, and an MLP that adds nothing."""
    prefix = f"model.layers.{layer}"
    up = torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE)
    return {
        f"{prefix}.input_layernorm.weight": _restoring_norm(num_filled_slots),
        **{f"{prefix}.self_attn.{name}.weight": weight for name, weight in attention.items()},
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
        f"{prefix}.mlp.gate_proj.weight": up,
        f"{prefix}.mlp.up_proj.weight": up.clone(),
        f"{prefix}.mlp.down_proj.weight": up.T.contiguous(),
    }


def _restoring_norm(num_filled_slots: int) -> torch.Tensor:
    """The weight with which RMSNorm gives back its input, whose filled dimensions are +-1."""
    return torch.full((HIDDEN_SIZE,), math.sqrt((1 + num_filled_slots * CODE_SIZE) / HIDDEN_SIZE))
