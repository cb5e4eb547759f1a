# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, written as checkpoints vLLM can load."""

from __future__ import annotations

import json
from pathlib import Path

KINDS = ("llama", "qwen3", "gemma2", "windows", "llama4", "qwen3_next")
VOCAB_SIZE = 512
MAX_MODEL_LEN_TOKENS = 512
LORA_RANK = 8
IMAGE_SIZE = 28  # pixels
IMAGE_TOKENS = 40
_HIDDEN_SIZE, _INTERMEDIATE_SIZE, _NUM_LAYERS = 128, 256, 2
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_SIZE = 4, 2, 32


def save_model(kind: str, directory: Path) -> Path:
    """Write a model of ``kind``, one of KINDS, to ``directory``.

    gemma2 has soft-capped scores and alternates between full attention and a window of 64 tokens,
    so that vLLM keeps two KV cache groups; windows is the same without the soft cap. llama4 has a
    layer with chunked local attention, and qwen3_next one with linear attention, which vLLM
    computes in bfloat16 on CPUs.
    """
    import torch
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN_TOKENS,
        # wide enough for a clear best token at most positions
        "initializer_range": 0.2,
        "torch_dtype": "float32",
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif kind in ("gemma2", "windows"):
        model = Gemma2ForCausalLM(
            Gemma2Config(
                **shape,
                sliding_window=64,
                attn_logit_softcapping=20.0 if kind == "gemma2" else None,
                query_pre_attn_scalar=32,
                attn_implementation="eager",
            )
        )
    elif kind == "llama4":
        model = Llama4ForCausalLM(
            Llama4TextConfig(
                **shape,
                intermediate_size_mlp=_INTERMEDIATE_SIZE,
                attention_chunk_size=64,
                layer_types=["chunked_attention", "full_attention"],
                no_rope_layers=[1, 0],
                num_local_experts=2,
                moe_layers=[],
                interleave_moe_layer_step=0,
            )
        )
    elif kind == "qwen3_next":
        # a token has so many keys and values that a block, as large as a state, has few tokens
        heads = {"num_key_value_heads": _NUM_HEADS, "head_dim": 128}
        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **{**shape, **heads},
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=1,
                linear_num_value_heads=2,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
            )
        )
    else:
        raise ValueError(f"model kind {kind!r} was given, expected one of {', '.join(KINDS)}")
    model.save_pretrained(directory)
    return directory


def save_image_model(directory: Path) -> Path:
    """Write a model that reads an image before a text (BLIP-2) and its processor to ``directory``.
    It needs no torchvision, as many others do."""
    import torch
    from transformers import (
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    vision = Blip2VisionConfig(**small, num_hidden_layers=1, image_size=IMAGE_SIZE, patch_size=14)
    query = Blip2QFormerConfig(
        **small,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        encoder_hidden_size=64,
        cross_attention_frequency=1,
        initializer_range=0.2,
    )
    text = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE,
        word_embed_proj_dim=_HIDDEN_SIZE,
        ffn_dim=_INTERMEDIATE_SIZE,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=_NUM_HEADS,
        max_position_embeddings=MAX_MODEL_LEN_TOKENS,
        init_std=0.2,
    )
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=query.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=0.2,
    )
    Blip2ForConditionalGeneration(config).save_pretrained(directory)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    Blip2Processor(
        image_processor=BlipImageProcessor(size=size),
        tokenizer=tokenizer,
        num_query_tokens=IMAGE_TOKENS,
    ).save_pretrained(directory)
    return directory


def save_drafter(target: Path, directory: Path) -> Path:
    """Write a drafter of the kind EAGLE for a model of the kind "llama" to ``directory``: its first
    layer behind a random projection, which seldom guesses right."""
    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = {
        name.removeprefix("model."): weight
        for name, weight in load_file(target / "model.safetensors").items()
        if name.startswith(("model.layers.0.", "model.embed_tokens."))
        and "input_layernorm" not in name
    }
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(_HIDDEN_SIZE, 2 * _HIDDEN_SIZE, generator=generator)
    weights["fc.weight"] = 0.1 * projection
    save_file(weights, directory / "model.safetensors")
    return directory


def save_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter with random weights for the model of kind "llama" to ``directory``."""
    import torch
    from safetensors.torch import save_file

    query_size, kv_size = _NUM_HEADS * _HEAD_SIZE, _NUM_KV_HEADS * _HEAD_SIZE
    modules = {  # input and output size
        "self_attn.q_proj": (_HIDDEN_SIZE, query_size),
        "self_attn.k_proj": (_HIDDEN_SIZE, kv_size),
        "self_attn.v_proj": (_HIDDEN_SIZE, kv_size),
        "self_attn.o_proj": (query_size, _HIDDEN_SIZE),
        "mlp.gate_proj": (_HIDDEN_SIZE, _INTERMEDIATE_SIZE),
        "mlp.up_proj": (_HIDDEN_SIZE, _INTERMEDIATE_SIZE),
        "mlp.down_proj": (_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(_NUM_LAYERS):
        for module, (input_size, output_size) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (LORA_RANK, input_size)), ("B", (output_size, LORA_RANK))):
                weight = 0.15 * torch.randn(shape, generator=generator)
                weights[f"{name}.lora_{part}.weight"] = weight
    config = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "target_modules": sorted(module.split(".")[1] for module in modules),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def save_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with one token per byte to ``directory``."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]  # LlamaConfig's ids
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    LlamaConfig().save_pretrained(directory)  # vLLM looks for one, and waits before it looks again
    return directory
